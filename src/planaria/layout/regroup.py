"""Moving memberships: adding and removing servers, and keeping fault domains apart.

A *membership* is one position of one group, held by one place. All records of that position move
with it, so the share of memberships that change is the share of bytes that a resize puts on the
wire. One engine serves every change: memberships flow from servers that have more than their fair
share to servers that have less, data and parity counted apart, and each single move is the one
that costs least: first in memberships that differ from before, then in pairs of servers that would
share too many groups, or none, and in owners that would send one holder too much.

Where no single move helps, a chain does: b hands a membership to u, and u another to t. Where all
groups hold the same servers, two members of a group exchange data for parity instead.

Where servers know only a part of the others, pairs that share no group are no loss but the aim: a
board of its own keeps the scatter width (near.py).

Like the groups themselves the result is part of the format: no randomness, no floating point.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from planaria.errors import LayoutError
from planaria.layout.board import DATA, EITHER, PARITY, Board, GroupArray, Ints
from planaria.layout.near import NearBoard, few_meet

Domains = Sequence[Hashable] | Mapping[int, Hashable]

_ROUNDS = 4


def regroup(
    groups: npt.NDArray[np.integer],
    k: int,
    places: Iterable[int],
    domains: Domains | None = None,
) -> GroupArray:
    """The groups for the servers in `places`, with as few memberships changed as can be.

    G, k and r stay. A place that is missing from `places` gives up all of its memberships, a new
    one takes its fair share; afterwards every server's data count and parity count is within one
    group of even (with `domains`: of the evenest that the domains allow), and no two members of a
    group share a domain.

    What changes is at least the fair share of the servers that come, or all of the servers that go.
    Reached is 1.08 times that in the worst case, when exactly k + r servers remain and members must
    exchange data for parity, and 1.00 in nearly all others; tests/test_groups.py holds 1.1. Domains
    can force more: a membership may have to go by way of a server that both groups admit.
    """
    before, servers = _checked(groups, k, places)
    domain = _domain_numbers(servers, domains, before.shape[1])
    kind_of_board = NearBoard if few_meet(before, servers, domain) else Board
    board = kind_of_board(before, k, servers, domain)
    for _ in range(_ROUNDS):
        board.level(PARITY)
        board.level(DATA)
        board.replace_leaving()
        board.level_by_exchange()
        if board.level_now():
            break
        board.level(EITHER)
        board.level_by_exchange()
        if board.level_now():
            break
    return board.result()


def moved_share(old: npt.NDArray[np.integer], new: npt.NDArray[np.integer]) -> float:
    """The share of memberships, hence of records, that differ between two lists of groups."""
    if old.shape != new.shape:
        raise LayoutError(
            f"groups of shape {old.shape} and {new.shape} cannot be compared; a resize keeps the "
            f"number and the width of groups."
        )
    return float(np.count_nonzero(old != new)) / old.size


def _checked(
    groups: npt.NDArray[np.integer], k: int, places: Iterable[int]
) -> tuple[Ints, list[int]]:
    before = np.asarray(groups, dtype=np.int64)
    if before.ndim != 2 or before.size == 0 or not 1 <= k <= before.shape[1]:
        raise LayoutError(f"groups of shape {before.shape} do not fit k = {k}; need [G, k + r].")
    servers = sorted({int(place) for place in places})
    width = before.shape[1]
    if servers and (servers[0] < 0 or servers[-1] > np.iinfo(np.int32).max):
        raise LayoutError("places must be numbers from 0 to 2^31 - 1.")
    if len(servers) < width:
        raise LayoutError(
            f"{len(servers)} servers are too few for groups of {k} data + {width - k} parity = "
            f"{width}; keep at least {width} servers."
        )
    return before, servers


def _domain_numbers(servers: list[int], domains: Domains | None, width: int) -> list[int]:
    """A number per server, equal where the fault domain is."""
    if domains is None:
        return list(range(len(servers)))
    try:
        labels = [domains[place] for place in servers]
    except (IndexError, KeyError):
        missing = [place for place in servers if not _has(domains, place)]
        raise LayoutError(f"no fault domain is given for the places {missing}.") from None
    numbers: dict[Hashable, int] = {}
    for label in labels:
        numbers.setdefault(label, len(numbers))
    if len(numbers) < width:
        raise LayoutError(
            f"{len(servers)} servers stand in {len(numbers)} fault domains, but a group of {width} "
            f"members needs {width} different ones; add {width - len(numbers)} domains, or lower "
            f"k or parity."
        )
    return [numbers[label] for label in labels]


def _has(domains: Domains, place: int) -> bool:
    return place in domains if isinstance(domains, Mapping) else place < len(domains)
