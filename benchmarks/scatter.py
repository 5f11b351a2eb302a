"""How many others a server should share stripes with: the curves behind `scatter`'s default.

    python -m benchmarks.scatter                       # 1,000 servers, k = 8; some seconds
    python -m benchmarks.scatter --servers 200 --k 4

From the true groups, without any job: the chance that something is lost when one server in a
hundred dies at the same moment; what the busiest survivor reads for the rebuild of one server, over
the bytes that were lost; and to how many holders an owner sends its deltas, one message each in a
step.
"""

from __future__ import annotations

import argparse

import numpy as np

from planaria.layout import Layout, default_scatter


def chance_of_loss(layout: Layout, failed: int, draws: int, rng: np.random.Generator) -> float:
    """That of so many servers, taken at random, more than r stand in one group."""
    dead = np.zeros(len(layout.places), np.bool_)
    losses = 0
    for _ in range(draws):
        dead[:] = False
        dead[rng.choice(len(dead), failed, replace=False)] = True
        losses += bool((dead[layout.groups].sum(axis=1) > layout.r).any())
    return losses / draws


def busiest_share(layout: Layout) -> float:
    """What one survivor reads, where k of the mates of each lost record do, over the lost bytes."""
    shared = layout.mates(0)
    lost = sum(shared.values()) / (layout.k + layout.r - 1)  # regions
    return max(shared.values()) / lost * layout.k / (layout.k + layout.r - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--draws", type=int, default=1000)
    options = parser.parse_args()
    failed = max(2, options.servers // 100)
    print(f"{options.servers} servers, k = {options.k}; {failed} die at once")
    print("| r | scatter | chance of loss | busiest survivor reads | holders |")
    print("| --- | --- | --- | --- | --- |")
    for r in (1, 2):
        width = options.k + r
        for scatter in (2 * (width - 1), default_scatter(options.k, r), 8 * width, 16 * width):
            show(options.servers, options.k, r, scatter, failed, options.draws)
        show(options.servers, options.k, r, options.servers - 1, failed, options.draws)


def show(servers: int, k: int, r: int, scatter: int, failed: int, draws: int) -> None:
    layout = Layout.fresh(servers, r, k, scatter=min(scatter, servers - 1))
    chance = chance_of_loss(layout, failed, draws, np.random.default_rng(1))
    cells = (r, len(layout.mates(0)), f"{chance:.3f}", f"{busiest_share(layout):.2f}")
    print(f"| {' | '.join(map(str, cells))} | {len(layout.holders(0))} |")


if __name__ == "__main__":
    main()
