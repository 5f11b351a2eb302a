"""Moves that keep the scatter width: on this board it costs to meet somebody new.

In a large cluster a server shares groups with few others, its mates (groups.py). A resize must not
undo that. So what a leaving server held goes to servers that know the rest of the group, and who
comes takes memberships that lie close together. Mates count more the more of them a server has
already: what grows is kept even, and no server pays for all.

How far it can be kept follows from balance. In a cluster of a thousand everybody has room for one
more membership of each kind at most. So who leaves has as many takers as it had memberships, and
who comes as many givers, which is more than there are mates. When a server is lost and another one
comes, the second resize finds the memberships that are far from home, and undoes the first.
"""

import heapq

import numpy as np

from planaria.layout.board import DATA, EITHER, UNREACHABLE, Board, Ints, count_meetings

# Weights of a move, between those of a membership and of a pair that is used once more. The first
# is for each mate that the two have already.
_MATE = 1 << 10
_HOLDER = 1 << 14
# The more room a taker has the better: else the last memberships find room only far away.
_ROOM = 16
# Givers that are judged together, those of all takers taken together, and for each at least.
_GIVERS = 256
_GIVERS_EACH = 8
# A width is no accident: fewer than three of four pairs meet that could.
_FEW = (3, 4)


def few_meet(before: Ints, servers: list[int], domain: list[int]) -> bool:
    """Whether those that stay have clearly fewer mates than they could, hence a scatter width.

    Who shares a domain cannot meet. Where meetings are hardly more than pairs some do not meet by
    chance, and fewer servers than fill two groups are never kept apart.
    """
    places = np.asarray(servers, dtype=np.int64)
    number = np.minimum(np.searchsorted(places, before), places.size - 1)
    number[places[number] != before] = places.size  # all those that leave
    pairs = count_meetings(number, number, places.size + 1)[:-1, :-1]
    old = np.flatnonzero(pairs.diagonal())
    label = np.asarray(domain)[old]
    apart = label[:, None] != label
    pairs = pairs[np.ix_(old, old)] * apart
    could = np.minimum(np.count_nonzero(apart, axis=1), pairs.sum(axis=1))
    few, of = _FEW
    met = int(np.count_nonzero(pairs))
    return old.size >= 2 * before.shape[1] and of * met < few * int(could.sum())


class NearBoard(Board):
    """Groups in the making, of which each server knows only a part of the others."""

    def __init__(self, before: Ints, k: int, servers: list[int], domain: list[int]) -> None:
        super().__init__(before, k, servers, domain)
        # How many each server shares groups with, itself included; 0 of those who leave.
        self.mates = np.zeros(self.domain.size, dtype=np.int64)
        self._count_mates(np.arange(self.servers))

    def _count_mates(self, servers: Ints) -> None:
        self.mates[servers] = np.count_nonzero(self.pairs[servers, : self.servers], axis=1)

    def _tally(self, row: int, change: int) -> None:
        super()._tally(row, change)
        group = self.members[row]
        self._count_mates(group[group < self.servers])

    def level(self, kind: int) -> None:
        """As for any board, but memberships of leaving members choose who takes them."""
        if kind != EITHER:
            self._hand_over(kind)
        super().level(kind)

    def _hand_over(self, kind: int) -> None:
        """Give the memberships of leaving members away, each time the cheapest of all.

        Groups of which most stay come first: the others may form anywhere.
        """
        leaving = np.argwhere(self.members[:, self.spans[kind]] >= self.servers)
        leaving[:, 1] += self.spans[kind].start
        heap = [(0, 0, row, column) for row, column in leaving.tolist()]
        most = self._most(kind)
        while heap:
            _, _, row, column = heap[0]
            missing = int(np.count_nonzero(self.members[row] >= self.servers))
            costs = self._taker_costs(kind, row, column, most)
            taker = int(costs.argmin())
            # Others may be cheaper by now than this one, which was judged when there was more room.
            judged = (missing, int(costs[taker]) // _HOLDER, row, column)
            heapq.heapreplace(heap, judged)
            if heap[0] == judged:
                heapq.heappop(heap)
                if costs[taker] < UNREACHABLE:
                    self._replace(row, column, taker)
                    most = self._most(kind)

    def _taker_costs(self, kind: int, row: int, column: int, most: Ints) -> Ints:
        """What it costs if each server takes a leaving member's position, int64 [servers]."""
        group, all_servers = self.members[row], slice(0, self.servers)
        stay = group[group < self.servers]
        new = self.pairs[stay, all_servers] == 0
        mates = self.mates[all_servers] + self.mates[stay, None]
        cost: Ints = (mates * new).sum(axis=0) * _MATE
        cost += self._new_holders(kind, row)
        # Of equals who knows the leaving member least: its nearest mates can take what is left.
        cost += self.pairs[group[column], all_servers]
        room = most - self.count[kind, all_servers]
        cost -= room * _ROOM
        cost[self.held[row, self.domain[all_servers]] | (room <= 0)] = UNREACHABLE
        return cost

    def _new_holders(self, kind: int, row: int) -> Ints:
        """The cost of messages that nobody sends yet, if each server takes a position of a kind."""
        partners = self.members[row, self.spans[1 - kind]]
        partners = partners[partners < self.servers]
        sent = self.sent.T if kind == DATA else self.sent
        new: Ints = np.count_nonzero(sent[partners, : self.servers] == 0, axis=0) * _HOLDER
        return new

    def _most(self, kind: int) -> Ints:
        """Up to how many memberships servers may take: no more have one above the least than must.

        Else those who are left short would have to be given what others hold.
        """
        low, high = self.low[kind, : self.servers], self.high[kind, : self.servers]
        above = np.maximum(self.count[kind, : self.servers] - low, 0)
        may = int(self.count[kind].sum()) - int(low.sum())
        return high if int(above.sum()) < may else low

    def _move_directly(self, kind: int, givers: Ints, takers: Ints) -> bool:
        """One move to a server that is short, from those near it.

        Parity comes first, to one newcomer after the other: if all began at once they would all
        begin at the same place. Then each has mates, and data goes to the neediest.
        """
        if givers[0] >= self.servers:
            return super()._move_directly(kind, givers, takers)
        count = self.count[kind, takers]
        missing = self.low[kind, takers] - count
        order = np.lexsort((takers, -missing if kind == DATA else -count, missing <= 0))
        judged = max(_GIVERS_EACH, _GIVERS // max(1, int((missing > 0).sum())))
        return any(self._take(kind, givers, taker, judged) for taker in takers[order].tolist())

    def _take(self, kind: int, givers: Ints, taker: int, judged: int) -> bool:
        """One move from the nearest givers that can; to who is nowhere yet, from the emptiest, so
        that no remainders are left all over the cluster.
        """
        if self.mates[taker]:
            met = np.flatnonzero(self.pairs[taker, : self.servers])
            far = -self.pairs[met[:, None], givers].sum(axis=0)
        else:
            far = self.count[kind, givers]
        nearest = givers[np.lexsort((givers, far))]
        return any(
            self._move_best(kind, nearest[first : first + judged].tolist(), taker)
            for first in range(0, nearest.size, judged)
        )

    def _pair_cost(self, rows: Ints, giver: Ints, taker: int) -> Ints:
        """New mates less those that giver[i] loses, if `taker` replaces it in group rows[i]."""
        group = self.members[rows]
        met, left = self.pairs[taker][group], self.pairs[giver[:, None], group]
        mates = self.mates[group]
        cost = met + (met == 0) * (self.mates[taker] + mates) * _MATE
        lost = left - 1 + (left == 1) * (self.mates[giver][:, None] + mates) * _MATE
        cost -= lost * (giver[:, None] < self.servers)
        counted = (group != giver[:, None]) & (group < self.servers)
        return np.asarray((cost * counted).sum(axis=1))

    def _traffic_cost(self, kind: int, rows: Ints, giver: Ints, taker: int) -> Ints:
        """As `_pair_cost`, for messages from owners to holders: each is one in every step."""
        if kind == EITHER:
            return np.zeros(rows.size, dtype=np.int64)
        sent = self.sent if kind == DATA else self.sent.T
        partners = self.members[rows, self.spans[1 - kind]]
        new = sent[taker][partners] == 0
        lost = (sent[giver[:, None], partners] == 1) & (giver[:, None] < self.servers)
        cost = (new.astype(np.int64) - lost) * _HOLDER * (partners < self.servers)
        return np.asarray(cost.sum(axis=1))
