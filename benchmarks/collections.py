"""A collection's forward and backward over nn.EmbeddingBag's in plain torch, in one process.

`python -m benchmarks.collections` prints ratios of CPU time. The rows are given, as if looked up
while the batch before computed; what is left is what the trainer itself does: dedup of the ids,
pooling, and one summed gradient per distinct row. Torch's sparse gradients are not yet summed per
row when backward ends; with coalesce(), which its optimizers call, they are.
"""

from __future__ import annotations

import argparse
import os

# Before torch is imported: its idle threads would otherwise spin on the core that is measured.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.timing import Side, interleaved
from planaria.kernels.types import Floats, Index
from planaria.optimizers import Optimizer
from planaria.torch import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from planaria.torch.features import bind_all
from planaria.torch.sparse import Prepared, SparseStep

FEATURES = 26
ROWS = 100_000


class GivenRows:
    """The rows of a batch, in this process, without a server; it is its own source of steps."""

    def __init__(self, collection: EmbeddingBagCollection, dim: int) -> None:
        bind_all([collection.tables], Optimizer("sgd"), self)
        self.dim = dim
        self.step = SparseStep(self, [dim])

    def current_step(self) -> SparseStep:
        return self.step

    def lookup(self, rows: Sequence[Index]) -> list[Floats]:
        return [torch.randn(len(index), self.dim).numpy() for index in rows]

    def begin(self, prepared: Prepared, values: list[Floats]) -> None:
        self.step = SparseStep(self, [self.dim])
        self.step.expect(prepared, values)


def batch(samples: int, bag: int) -> KeyedJaggedTensor:
    """Ids whose logarithm is uniform: few rows are hot, most are rare, as in click data."""
    drawn = torch.rand(FEATURES * samples * bag, dtype=torch.float64)
    ids = (ROWS**drawn).long().clamp(max=ROWS - 1)
    lengths = torch.full((FEATURES * samples,), bag)
    return KeyedJaggedTensor([f"f{n}" for n in range(FEATURES)], ids, lengths=lengths).sync()


def sides(samples: int, bag: int, dim: int, pooling: PoolingType) -> dict[str, Side]:
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(ROWS, dim, f"t{n}", [f"f{n}"], pooling=pooling)
            for n in range(FEATURES)
        ]
    )
    rows, features = GivenRows(collection, dim), batch(samples, bag)
    gradient = torch.randn(samples, FEATURES * dim)
    prepared = collection.prepare(features)
    values = rows.lookup(prepared.rows)

    def ours(given: Prepared) -> None:
        rows.begin(given, values)
        collection(features).values().backward(gradient)
        rows.step.gradients()

    mode = pooling.value.lower()
    bags = [
        nn.EmbeddingBag(ROWS, dim, mode=mode, sparse=True, include_last_offset=True)
        for _ in range(FEATURES)
    ]
    inputs = [(one.values(), one.offsets()) for one in features.to_dict().values()]

    def plain() -> None:
        for one in bags:
            one.weight.grad = None
        torch.cat([one(*given) for one, given in zip(bags, inputs, strict=True)], 1).backward(
            gradient
        )

    def plain_summed() -> None:
        plain()
        for one in bags:
            one.weight.grad.coalesce()

    return {
        "ours": Side(lambda _: ours(collection.prepare(features))),
        "ours, prepared ahead": Side(lambda _: ours(prepared)),
        "torch": Side(lambda _: plain()),
        "torch, gradients summed": Side(lambda _: plain_summed()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.collections")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=21)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    for name, bag, pooling in (
        ("one id per feature", 1, PoolingType.SUM),
        ("mean of 10 ids", 10, PoolingType.MEAN),
    ):
        seconds = interleaved(
            sides(given.samples, bag, given.dim, pooling), given.rounds, warm_up_rounds=2
        )
        print(f"{name}: {FEATURES} features, {given.samples} samples, dim {given.dim}")
        for side, median in seconds.items():
            ratio = seconds["torch"] / median
            print(f"  {side:<24} {median * 1e3:8.2f} ms   {ratio:5.2f}x")


if __name__ == "__main__":
    main()
