"""Choosing the groups of a fresh cluster.

A group is an ordered list of k + r places: positions 0 .. k-1 hold data, k .. k+r-1 parity. Three
things make a good list of groups: every server holds the same share of data and of parity; the
mates of a lost server are spread over many survivors, so that they share its rebuild; and what
owners send to their parity holders is spread as well.

How many survivors is a dial, the *scatter width*: how many others a server shares groups with. Few
mean few messages in a step, and few sets of servers whose loss at once is fatal; many mean fast
rebuilds. By default it is a few times k + r, whatever the number of servers.

The construction is cyclic. A *base block* is k + r distinct numbers modulo N, and shifting it by
0 .. N-1 gives N groups in which every server stands exactly once at each position, so balance is
exact whatever the block is. How often two servers share a group depends only on their difference
modulo N, so spreading rebuilds means that all differences occur, and about equally often, which a
greedy choice over N numbers reaches in a millisecond. Where not all are to be mates, the block is
chosen within a window of that circle: then no difference is larger than the window.

Every checkpoint has the groups of its job written down, so that it can be read whatever is chosen
today. All processes of a job choose for themselves and must agree: there is no randomness and no
floating point here, and frozen checksums in the tests tell whoever changes it.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planaria.errors import LayoutError
from planaria.layout.board import GroupArray
from planaria.layout.regroup import Domains, regroup

# Every server stands in at least this many groups: a resize moves whole memberships, and the
# finer they are the more evenly they divide.
LEAST_GROUPS_PER_SERVER = 64

# Blocks are added until no two servers share more than 6/5 of the average number of groups, or
# there are twice as many as coverage needs; up to 64 servers the former always comes first. That is
# also how far the busiest survivor of a rebuild is from the average one.
EVEN_ENOUGH = (6, 5)

# Times k + r: the scatter width, unless somebody names one. docs/core.md has the curves.
SCATTER_PER_MEMBER = 4

# How far the erasure codes reach (planaria.codes).
MAX_K = 64
MAX_R = 4

_NEVER = np.iinfo(np.int64).max
_ANOTHER_MESSAGE = 1 << 40  # outweighs whatever is sent at the distances that there are


def default_k(servers: int, r: int) -> int:
    """Data records per stripe when the user names only r: max(1, min(8, servers - r - 1)).

    One server more than a group needs leaves every server out of some groups, which is what spreads
    a rebuild; 8 bounds the records that are read to rebuild one. Without parity (r = 0) a stripe
    protects nothing, so it is one record.
    """
    if r < 0:
        raise LayoutError(f"parity is {r}; it must be 0 or more.")
    if servers < r + 1:
        raise LayoutError(
            f"{servers} servers cannot hold 1 data and {r} parity records of a stripe on different "
            f"servers; start at least {r + 1} servers or lower parity to {max(servers - 1, 0)}."
        )
    return 1 if r == 0 else max(1, min(8, servers - r - 1))


def default_scatter(k: int, r: int) -> int:
    return SCATTER_PER_MEMBER * (k + r)


def least_scatter(k: int, r: int) -> int:
    """A server stands at each position of a group, with all others before and behind it."""
    return 2 * (k + r - 1)


def choose_groups(
    servers: int, k: int, r: int, domains: Domains | None = None, scatter: int | None = None
) -> GroupArray:
    """The groups of a fresh cluster with places 0 .. servers-1, as int32 [G, k + r].

    `domains[place]` is the fault domain (host, rack) of a place; given, no two members of a group
    share one, and the load is as even as the domains allow. `scatter` is how many others a server
    may share groups with, `least_scatter` or more, unless that is all; None: `default_scatter`.
    With domains all others may be. Equal arguments give equal groups on every machine, for ever.
    """
    check_sizes(servers, k, r)
    scatter = default_scatter(k, r) if scatter is None else scatter
    if scatter < min(least_scatter(k, r), servers - 1):
        raise LayoutError(
            f"a scatter width of {scatter} is too small for groups of {k + r} servers; "
            f"it must be {least_scatter(k, r)} or more."
        )
    if domains is None:
        return _cyclic_groups(servers, k, r, window_of(servers, scatter))
    return regroup(_cyclic_groups(servers, k, r, servers), k, range(servers), domains)


def window_of(servers: int, scatter: int) -> int:
    """How many numbers on the circle a block is chosen from. So many have all differences below
    their number, and each difference is two mates.
    """
    if scatter > servers:
        return servers
    return (servers if scatter >= servers - 1 else scatter) // 2 + 1


def check_sizes(servers: int, k: int, r: int) -> None:
    """Raise LayoutError unless k + r different servers can be found among `servers`."""
    if k < 1 or r < 0:
        raise LayoutError(f"k is {k} and r is {r}; k must be 1 or more and r 0 or more.")
    if k > MAX_K or r > MAX_R:
        raise LayoutError(f"k is {k} and r is {r}; the codes reach to {MAX_K} and {MAX_R}.")
    if servers < k + r:
        raise LayoutError(
            f"{servers} servers are too few for groups of {k} data + {r} parity = {k + r}; "
            f"add {k + r - servers} or lower k or parity."
        )


def _cyclic_groups(servers: int, k: int, r: int, window: int) -> GroupArray:
    parity = _ParityChoice(servers, r, few=window < servers)
    found = _base_blocks(servers, k + r, window)
    blocks = np.stack([parity.last(block) for block in found])  # [B, k+r]
    shifts = np.arange(servers)
    # Block-major, so that any N consecutive groups of one block are balanced: a last slot that is
    # only partly used still loads all servers alike.
    groups = (blocks[:, None, :] + shifts[None, :, None]) % servers
    return groups.reshape(-1, k + r).astype(np.int32)


@lru_cache(maxsize=64)  # a simulator starts the same few clusters thousands of times
def _base_blocks(servers: int, width: int, window: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Blocks of `width` numbers below `window` whose differences modulo `servers` are as even as
    can be.
    """
    # used[d] = ordered pairs of one block at distance d, kept twice in a row so that the costs of
    # all candidates against a member e are the plain window used[N-e : 2N-e].
    used = np.zeros(2 * servers, dtype=np.int64)
    costs = np.lib.stride_tricks.sliding_window_view(used, servers)
    some = used[1:window]  # at the distances that there can be
    blocks: list[npt.NDArray[np.int64]] = []
    least = -(-LEAST_GROUPS_PER_SERVER // width)
    while len(blocks) < least or not _all_covered(some, width):
        blocks.append(_next_block(used, costs, width, window))
    most = 2 * len(blocks)
    while len(blocks) < most and not _even_enough(some):
        blocks.append(_next_block(used, costs, width, window))
    return tuple(blocks)


def _next_block(
    used: npt.NDArray[np.int64], costs: npt.NDArray[np.int64], width: int, window: int
) -> npt.NDArray[np.int64]:
    """One more block, element by element: each time the one at the least used distances.

    The first choice after 0 is a least used distance itself, so an uncovered one if there is any:
    that is why covering all distances ends.
    """
    servers = costs.shape[1]
    block = np.zeros(width, dtype=np.int64)
    for size in range(1, width):
        have = block[:size]
        cost = costs[servers - have, :window].sum(axis=0)
        cost[have] = _NEVER
        chosen = int(cost.argmin())
        distance = (chosen - have) % servers
        used[distance] += 1
        used[servers - distance] += 1  # half way round is its own mirror and rightly counts twice
        used[servers:] = used[:servers]
        block[size] = chosen
    return block


def _all_covered(used: npt.NDArray[np.int64], width: int) -> bool:
    return width == 1 or used.size == 0 or bool(used.min() > 0)


def _even_enough(used: npt.NDArray[np.int64]) -> bool:
    above, below = EVEN_ENOUGH
    return used.size == 0 or int(used.max()) * used.size * below <= above * int(used.sum())


class _ParityChoice:
    """Picks which r members of each block hold parity, spreading data -> parity traffic.

    few: over few distances, since each is a message of every owner in every step. Where all are
    mates it is spread over all of them, so that a resize need not exchange data for parity.
    """

    def __init__(self, servers: int, r: int, few: bool) -> None:
        self._servers = servers
        self._r = r
        self._few = few
        self._sent = np.zeros(servers, dtype=np.int64)  # by distance from owner to holder

    def last(self, block: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The block with its parity members moved to the end."""
        if self._r == 0:
            return block
        distance = (block[None, :] - block[:, None]) % self._servers  # [from, to]
        sent = self._sent[distance]
        if self._few:
            sent[sent == 0] = _ANOTHER_MESSAGE
        holds = np.zeros(block.size, dtype=np.bool_)
        # The smaller side is picked: its few choices then decide all of the traffic.
        if 2 * self._r <= block.size:
            holds[_quietest(sent, self._r)] = True
        else:
            holds[:] = True
            holds[_quietest(sent.T, block.size - self._r)] = False
        np.add.at(self._sent, distance[np.ix_(~holds, holds)], 1)
        return np.concatenate([block[~holds], block[holds]])


def _quietest(sent: npt.NDArray[np.int64], size: int) -> list[int]:
    """`size` members, one at a time, whose columns add least; they send each other nothing."""
    cost = sent.sum(axis=0)
    chosen: list[int] = []
    for _ in range(size):
        cost[chosen] = _NEVER
        member = int(cost.argmin())
        chosen.append(member)
        cost = cost - sent[member]
    return chosen
