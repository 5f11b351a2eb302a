"""Trains a model that a configuration names on the data that it names.

`planaria train` runs this file in its trainers, as `planaria run` does a user's script. It is one:
a loop over `job.batches`, with nothing that others could not write.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from planaria.data import Samples
from planaria.data.metrics import RecentQuality
from planaria.data.source import sample_range
from planaria.errors import DataError
from planaria.models.building import (
    Readable,
    as_tensors,
    is_weighted,
    make_model,
    make_optimizer,
    one_each,
    open_data,
    table_configs,
)
from planaria.torch import EmbeddingBagCollection, Job, KeyedJaggedTensor, connect

QUALITY_SAMPLES = 16_384  # the last ones, over which it is measured while training
JUDGED_SAMPLES = 16_384  # at a time


def main() -> None:
    job = connect()
    config = job.config
    data = open_data(config)
    torch.manual_seed(config.seed)
    collection = EmbeddingBagCollection(
        table_configs(data.schema, config.model.dim), is_weighted=is_weighted(data.schema)
    )
    device = torch.device(config.trainer.device)
    model = make_model(config, data.schema, collection).to(device)
    optimizer = make_optimizer(config, model.parameters())
    job.keep(model=model, optimizer=optimizer)
    recent = RecentQuality(QUALITY_SAMPLES)
    steps = config.steps if config.data.epochs is None else None
    batches = job.batches(
        data.training,
        config.batch // config.trainers,
        epochs=config.data.epochs or 1,
        steps=steps,
        shuffle=config.data.source == "files" and config.data.shuffle == "on",
        collate_fn=clicks,
        workers=0 if config.data.source == "synthetic" else 1,  # those are made in no time
    )
    for dense, features, labels in batches:
        step, last = job.step + 1, job.config.steps
        for group in optimizer.param_groups:
            group["lr"] = job.config.lr(step)
        logits = one_each(model(dense.to(device), features))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auc = entropy = None
        if job.rank == 0:
            recent.add(labels.numpy(), logits.detach().cpu().numpy())
            if recent.due(step, last):
                auc, entropy = (None if math.isnan(x) else x for x in recent.measure())
        job.log(loss.item(), auc, entropy)
        if step == last:
            judge(job, model, data.held_out)


def clicks(samples: Samples) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """What a chance can be learnt from."""
    wrong = samples.labels[(samples.labels != 0) & (samples.labels != 1)]
    if len(wrong):
        raise DataError(
            f"a label is {wrong[0]:g}; expected 0 or 1: positive_from in the schema says from "
            "which value on it is a 1"
        )
    return as_tensors(samples)


def judge(job: Job, model: nn.Module, held_out: Readable) -> None:
    """The trained model on this rank's part of the held-out samples, some at a time."""
    start, count = sample_range(1, job.rank, job.world_size, held_out.samples or 0)
    with job.evaluate():
        for first in range(0, count, JUDGED_SAMPLES):
            wanted = min(JUDGED_SAMPLES, count - first)
            dense, features, labels = as_tensors(held_out.read(start + first, wanted))
            if len(labels):
                logits = one_each(model(dense.to(job.config.trainer.device), features))
                job.judge(first, labels, logits)
            if len(labels) < wanted:
                return


if __name__ == "__main__":
    main()
