"""A trainer of `planaria train`: its loop is ours, its model is in the configuration."""

from __future__ import annotations

import torch

from planaria import kernels
from planaria.cluster.files import JobFiles
from planaria.cluster.trainer_node import TrainerNode
from planaria.trainer.training import Training
from planaria.wire.messages import Member


def rehearse() -> None:
    """For a nursery. Nothing yet: what torch does for the first time may start threads."""


def run(files: JobFiles, member: Member, rank: int | None) -> str:
    """Until the job is over; returns why it is."""
    node = TrainerNode(files, member)
    config = node.config
    torch.set_num_threads(config.threads.trainer)
    kernels.set_threads(config.threads.trainer)
    training = Training(config, node.line)
    state = training.dense.export()
    client = node.begin(rank, state, lambda _: training.dense.digest(), lambda: training.loss)
    training.run(client)
    return node.join()
