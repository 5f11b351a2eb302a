"""A trainer of `planaria train`: its loop is ours, its model is in the configuration."""

from __future__ import annotations

import numpy as np
import torch

from planaria import kernels
from planaria.cluster.files import JobFiles
from planaria.cluster.trainer_node import TrainerNode
from planaria.trainer.training import Training
from planaria.wire.messages import Member


def rehearse() -> None:
    """For a nursery. Nothing: a step here makes what is forked hardly faster (docs/log.md)."""


def run(files: JobFiles, member: Member, rank: int | None) -> str:
    """Until the job is over; returns why it is."""
    node = TrainerNode(files, member)
    config = node.config
    torch.set_num_threads(config.threads.trainer)
    kernels.set_threads(config.threads.trainer)
    training: Training
    at_the_end = (lambda _: training.dense.digest(), lambda: training.loss)
    if rank is None:  # everybody waits: while it gets ready, it is given a place and a state
        client = node.begin(None, np.empty(0, np.uint8), *at_the_end)
        training = Training(config, node.line)
    else:
        training = Training(config, node.line)
        client = node.begin(rank, training.dense.export(), *at_the_end)
    training.run(client)
    return node.join()
