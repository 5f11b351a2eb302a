"""How many others a server should share stripes with: the curves behind `scatter`'s default.

    python -m benchmarks.scatter                       # 1,000 servers, k = 8; some seconds
    python -m benchmarks.scatter --servers 200 --k 4
    python -m benchmarks.scatter --resizes --k 4       # what is left of it; a minute

From the true groups, without any job: the chance that something is lost when one server in a
hundred dies at the same moment; what the busiest survivor reads for the rebuild of one server, over
the bytes that were lost; and to how many holders an owner sends its deltas, one message each in a
step.
"""

from __future__ import annotations

import argparse

import numpy as np

from planaria.layout import Layout, choose_groups, default_scatter, regroup
from planaria.layout.board import GroupArray


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
    parser.add_argument("--resizes", action="store_true", help="mates after losses and resizes")
    options = parser.parse_args()
    if options.resizes:
        show_resizes(options.servers, options.k)
        return
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


def show_resizes(servers: int, k: int) -> None:
    print(f"{servers} servers, k = {k}: the most and the mean of all servers")
    print("| r | after | mates | mean | holders | mean |")
    print("| --- | --- | --- | --- | --- | --- |")
    for r in (1, 2):
        fresh = choose_groups(servers, k, r)
        show_width(fresh, k, "the start")
        show_losses(fresh, k, np.random.default_rng(1))
        for name, places in (
            ("one more", servers + 1),
            ("a quarter more", servers * 5 // 4),
            ("a fifth fewer", servers * 4 // 5),
        ):
            show_width(regroup(fresh, k, range(places)), k, name)


def show_losses(groups: GroupArray, k: int, rng: np.random.Generator) -> None:
    """Some server is lost, and another one comes, again and again."""
    places = np.unique(groups).tolist()
    for loss in range(1, 21):
        places.remove(rng.choice(places))
        groups = regroup(groups, k, places)
        if loss == 1:
            show_width(groups, k, "a loss")
        places.append(places[-1] + 1)
        groups = regroup(groups, k, places)
        if loss in (1, 5, 20):
            show_width(groups, k, f"{loss} made up for")


def show_width(groups: GroupArray, k: int, after: str) -> None:
    layout = Layout(groups, k)
    mates = [len(layout.mates(place)) for place in layout.places]
    holders = [len(layout.holders(place)) for place in layout.places]
    cells = (max(mates), f"{np.mean(mates):.1f}", max(holders), f"{np.mean(holders):.1f}")
    print(f"| {layout.r} | {after} | {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
