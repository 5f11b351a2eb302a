"""Groups in the making: who holds what, what a move costs, and moves until all is level."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from planaria.errors import LayoutError

GroupArray = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

# Kinds of membership. Shares are kept for data and for parity; EITHER is their sum.
DATA, PARITY, EITHER = 0, 1, 2
_LONGEST_CHAIN = 4
_FULLEST = 8  # givers that are judged together; more cost time and gain little
# Weights of a move: a membership that changes outweighs every pair, a pair that is covered or
# uncovered outweighs every pair that is merely used once more or once less.
PAIR_COVERED = 1 << 14
MEMBERSHIP = 1 << 28
UNREACHABLE = 1 << 40


def fair_shares(domain: Sequence[int], groups: int, width: int) -> list[tuple[int, int]]:
    """Memberships per server, as (numerator, denominator): the evenest that the domains allow.

    A domain stands at most once in a group. One whose even share is more than that is held to one
    membership in every group, and what it cannot take is shared out among the rest.
    """
    sizes = np.bincount(np.asarray(domain))
    held = np.zeros(sizes.size, dtype=np.bool_)
    while True:
        rest = groups * (width - int(held.sum()))
        rest_servers = int(sizes[~held].sum())
        too_big = ~held & (sizes * rest > groups * rest_servers)
        if not too_big.any():
            break
        held |= too_big
    return [(groups, int(sizes[d])) if held[d] else (rest, rest_servers) for d in domain]


class Board:
    """Groups in the making. Servers are numbered 0 .. n-1; leaving members stand behind them.

    A leaving member is a removed server, or a stand-in for a member that may not stay because of
    its domain. Its fair share is nothing, and a domain of its own keeps it out of everybody's way.
    """

    def __init__(self, before: Ints, k: int, servers: list[int], domain: list[int]) -> None:
        self.places = np.asarray(servers, dtype=np.int64)
        self.servers = len(servers)
        width = before.shape[1]
        self.spans = (slice(0, k), slice(k, width), slice(0, width))  # by kind
        removed = np.setdiff1d(before, self.places)
        known = np.concatenate([self.places, removed])
        by_place = np.argsort(known)
        members = by_place[np.searchsorted(known, before, sorter=by_place)]  # [G, k+r]
        n_groups = len(members)
        total = known.size + width
        own = np.arange(total - self.servers) + max(domain) + 1
        self.domain = np.concatenate([np.asarray(domain, dtype=np.int64), own])

        self.before = members
        self.was = np.zeros((3, n_groups, total), dtype=np.bool_)  # who held which kind before
        rows = np.arange(n_groups)[:, None]
        for kind, span in enumerate(self.spans):
            self.was[kind, rows, members[:, span]] = True
        self.members = members.copy()
        self._send_away_sharers(known.size)
        self.held = np.zeros((n_groups, int(self.domain.max()) + 1), dtype=np.bool_)
        self.held[rows, self.domain[self.members]] = True

        # By member, where it stands: group * width + position. Looking through all groups for each
        # move is what makes large clusters slow.
        flat = np.argsort(self.members.ravel(), kind="stable")
        ends = np.cumsum(np.bincount(self.members.ravel(), minlength=total))
        self.stands = np.split(flat, ends[:-1])

        # Groups that two share, and groups where one sends deltas to the other; see _tally.
        self.pairs = count_meetings(self.members, self.members, total)
        data, parity = (self.members[:, span] for span in self.spans[:EITHER])
        self.sent = count_meetings(data, parity, total)
        self.count = np.stack(
            [np.bincount(self.members[:, span].ravel(), minlength=total) for span in self.spans]
        )
        self.low, self.high = self._bounds(domain, n_groups, width, total)

    def _send_away_sharers(self, first_stand_in: int) -> None:
        """Put a stand-in wherever an earlier member of the group has the same domain."""
        width = self.members.shape[1]
        domain = self.domain[self.members]
        for position in range(1, width):
            shared = (domain[:, :position] == domain[:, position : position + 1]).any(axis=1)
            self.members[shared, position] = first_stand_in + position

    def _bounds(
        self, domain: list[int], n_groups: int, width: int, total: int
    ) -> tuple[Ints, Ints]:
        """The least and the most memberships of each kind that count as even, int64 [3, total]."""
        low = np.zeros((3, total), dtype=np.int64)
        high = np.zeros((3, total), dtype=np.int64)
        for server, (share, parts) in enumerate(fair_shares(domain, n_groups, width)):
            for kind, span in enumerate(self.spans):
                of_kind = (span.stop - span.start) * share
                low[kind, server] = of_kind // (width * parts)
                high[kind, server] = -(-of_kind // (width * parts))
        return low, high

    def level_now(self) -> bool:
        """Whether every count is within its bounds, those of leaving members included."""
        even = (self.low <= self.count) & (self.count <= self.high)
        return bool(even[[DATA, PARITY]].all())

    def level(self, kind: int) -> None:
        """Move memberships of one kind until every server holds its share or no move helps."""
        while True:
            givers, takers = self._givers_takers(kind)
            if givers.size == 0:
                return
            if self._move_directly(kind, givers, takers):
                continue
            chain = self._cheapest_chain(givers, takers, lambda b: self._move_costs(b, kind))
            # From the far end, so that nobody ever exceeds its share on the way.
            for giver, taker in reversed(chain):
                if not self._move_best(kind, [giver], taker):
                    return
            if not chain:
                return

    def replace_leaving(self) -> None:
        """Replace leaving members that no move within the shares could, beyond the shares.

        With barely enough domains a group may admit only servers that have their fill of the kind
        that it lacks. They take it all the same; exchanges then put the kinds right.
        """
        for row, column in np.argwhere(self.members >= self.servers).tolist():
            spare = (self.high - self.count)[EITHER, : self.servers]
            spare[self.held[row, self.domain[: self.servers]]] = -UNREACHABLE
            self._replace(row, column, int(spare.argmax()))

    def level_by_exchange(self) -> None:
        """As `level`, by letting two members of a group exchange data for parity."""
        for kind in (PARITY, DATA):
            while self._exchange_once(kind):
                pass

    def _exchange_once(self, kind: int) -> bool:
        other = 1 - kind
        givers, takers = self._givers_takers(kind)
        # Whoever gives one kind receives the other: it must have room for it.
        givers = givers[self.count[other, givers] < self.high[other, givers]]
        takers = takers[self.count[other, takers] > self.low[other, takers]]
        chain = self._cheapest_chain(givers, takers, lambda b: self._exchange_costs(b, kind))
        return bool(chain) and all(
            self._exchange_best(kind, giver, taker) for giver, taker in reversed(chain)
        )

    def _givers_takers(self, kind: int) -> tuple[Ints, Ints]:
        """Servers above and below their share, the furthest first; both empty when level."""
        count, low, high = self.count[kind], self.low[kind], self.high[kind]
        if (count > high).any():
            giving, taking = count > high, count < high
        elif (count < low).any():
            giving, taking = count > low, count < low
        else:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        givers = np.flatnonzero(giving)
        takers = np.flatnonzero(taking)
        leaving = givers >= self.servers
        givers = givers[np.lexsort((givers, (high - count)[givers], ~leaving))]
        takers = takers[np.lexsort((takers, (count - high)[takers], (count - low)[takers]))]
        return givers, takers

    def _move_directly(self, kind: int, givers: Ints, takers: Ints) -> bool:
        """One move to the neediest server from one of the fullest, or else from any that can."""
        taker = int(takers[0])
        # Equally full givers are judged together. Taking them in turn would pair each new server
        # with always the same giver, and so with always the same mates.
        excess = (self.count - self.high)[kind, givers[:_FULLEST]]
        leaving = givers[:_FULLEST] >= self.servers
        fullest = givers[:_FULLEST][(excess >= excess[0] - 1) & (leaving == leaving[0])]
        if self._move_best(kind, fullest.tolist(), taker):
            return True
        return any(self._move_best(kind, [giver], taker) for giver in givers.tolist())

    def _move_best(self, kind: int, givers: list[int], taker: int) -> bool:
        """Let `taker` replace one of `givers` in the group where that is cheapest, if any."""
        rows, columns = self._memberships(kind, givers)
        giver = self.members[rows, columns]
        admits = ~self.held[rows, self.domain[taker]] | (self.domain[giver] == self.domain[taker])
        rows, columns, giver = rows[admits], columns[admits], giver[admits]
        if rows.size == 0:
            return False
        cost = self._membership_cost(kind, rows, giver, taker) * MEMBERSHIP
        cost += self._pair_cost(rows, giver, taker) + self._traffic_cost(kind, rows, giver, taker)
        best = int(cost.argmin())
        self._replace(int(rows[best]), int(columns[best]), taker)
        return True

    def _memberships(self, kind: int, servers: Iterable[int]) -> tuple[Ints, Ints]:
        """Those of a kind that servers hold, as groups and positions, in the order of these."""
        found = np.sort(np.concatenate([self.stands[server] for server in servers]))
        rows, columns = np.divmod(found, self.members.shape[1])
        span = self.spans[kind]
        wanted = (columns >= span.start) & (columns < span.stop)
        return rows[wanted], columns[wanted]

    def _replace(self, row: int, column: int, taker: int) -> None:
        giver = int(self.members[row, column])
        self._tally(row, -1)
        self._put(row, column, taker)
        self._tally(row, +1)
        self.held[row, self.domain[giver]] = False
        self.held[row, self.domain[taker]] = True
        kind = DATA if column < self.spans[DATA].stop else PARITY
        self.count[[kind, EITHER], giver] -= 1
        self.count[[kind, EITHER], taker] += 1

    def _put(self, row: int, column: int, taker: int) -> None:
        place = row * self.members.shape[1] + column
        giver = int(self.members[row, column])
        self.stands[giver] = self.stands[giver][self.stands[giver] != place]
        self.stands[taker] = np.append(self.stands[taker], place)
        self.members[row, column] = taker

    def _membership_cost(self, kind: int, rows: Ints, giver: Ints | int, taker: int) -> Ints:
        """Changed memberships that a replacement adds (1), keeps (0) or undoes (-1)."""
        was = self.was[kind]
        added: Ints = was[rows, giver].astype(np.int64) - was[rows, taker]
        return added

    def _pair_cost(self, rows: Ints, giver: Ints, taker: int) -> Ints:
        """How much worse pairs are spread if `taker` replaces giver[i] in group rows[i]."""
        mates = self.members[rows]
        met = self.pairs[taker][mates]
        left = self.pairs[giver[:, None], mates]
        cost = np.where(met == 0, -PAIR_COVERED, met)
        stays = giver[:, None] < self.servers  # whom a leaving member met is of no account
        cost += np.where(left == 1, PAIR_COVERED, 1 - left) * stays
        counted = (mates != giver[:, None]) & (mates < self.servers)
        return np.asarray((cost * counted).sum(axis=1))

    def _traffic_cost(self, kind: int, rows: Ints, giver: Ints, taker: int) -> Ints:
        """As `_pair_cost`, for the deltas that owners send to parity holders."""
        if kind == EITHER:
            return np.zeros(rows.size, dtype=np.int64)
        sent = self.sent if kind == DATA else self.sent.T
        partners = self.members[rows, self.spans[1 - kind]]
        left = sent[giver[:, None], partners] * (giver[:, None] < self.servers)
        cost = (sent[taker][partners] - left) * (partners < self.servers)
        return np.asarray(cost.sum(axis=1))

    def _tally(self, row: int, change: int) -> None:
        """Take a group out of the counts of meetings (-1), or put it back (+1)."""
        data, parity, either = (self.members[row, span] for span in self.spans)
        self.pairs[either[:, None], either] += change
        self.sent[data[:, None], parity] += change

    def _exchange_best(self, kind: int, giver: int, taker: int) -> bool:
        """Let `giver` take the other kind from `taker` in the group where that is cheapest."""
        gives, given = self._memberships(kind, [giver])
        takes, taken = self._memberships(1 - kind, [taker])
        rows, at, to = np.intersect1d(gives, takes, assume_unique=True, return_indices=True)
        if rows.size == 0:
            return False
        cost = self._membership_cost(kind, rows, giver, taker)
        cost += self._membership_cost(1 - kind, rows, taker, giver)
        best = int(cost.argmin())
        row = int(rows[best])
        self._tally(row, -1)
        self._put(row, int(given[at[best]]), taker)
        self._put(row, int(taken[to[best]]), giver)
        self._tally(row, +1)
        self.count[kind, [giver, taker]] += (-1, 1)
        self.count[1 - kind, [giver, taker]] += (1, -1)
        return True

    def _move_costs(self, giver: int, kind: int) -> Ints:
        """Changed memberships if `giver` hands one of a kind to each server, int64 [servers]."""
        rows, _ = self._memberships(kind, [giver])
        was = self.was[kind, rows]
        cost = was[:, giver, None].astype(np.int64) - was[:, : self.servers]
        domain = self.domain[: self.servers]
        shut = self.held[rows][:, domain] & (domain != self.domain[giver])
        cost[shut] = UNREACHABLE
        cheapest: Ints = cost.min(axis=0, initial=UNREACHABLE)
        return cheapest

    def _exchange_costs(self, giver: int, kind: int) -> Ints:
        """As `_move_costs`, for exchanging one kind for the other inside a group."""
        theirs = self.spans[1 - kind]
        rows, _ = self._memberships(kind, [giver])
        was, other = self.was[kind, rows], self.was[1 - kind, rows]
        cost = was[:, giver, None].astype(np.int64) - was + other - other[:, giver, None]
        takes = np.zeros(was.shape, dtype=np.bool_)
        takes[np.arange(rows.size)[:, None], self.members[rows, theirs]] = True
        cost[~takes] = UNREACHABLE
        cheapest: Ints = cost[:, : self.servers].min(axis=0, initial=UNREACHABLE)
        return cheapest

    def _cheapest_chain(
        self, givers: Ints, takers: Ints, costs: Callable[[int], Ints]
    ) -> list[tuple[int, int]]:
        """The fewest hand-overs that lead from a giver to a taker, and of those the cheapest."""
        reached = {int(giver): 0 for giver in givers}
        parents: list[dict[int, int]] = []
        for _ in range(_LONGEST_CHAIN):
            cheapest: dict[int, tuple[int, int]] = {}
            for member, cost_so_far in reached.items():
                cost = costs(member)
                for server in np.flatnonzero(cost < UNREACHABLE).tolist():
                    offer = (cost_so_far + int(cost[server]), member)
                    if server not in cheapest or offer < cheapest[server]:
                        cheapest[server] = offer
            parents.append({server: member for server, (_, member) in cheapest.items()})
            ends = [server for server in takers.tolist() if server in cheapest]
            if ends:
                end = min(ends, key=lambda server: cheapest[server][0])
                return _walk_back(parents, end)
            reached = {server: cost for server, (cost, _) in cheapest.items()}
        return []

    def result(self) -> GroupArray:
        """The finished groups, by place. Who kept its kind in a group also keeps its position."""
        if (self.members >= self.servers).any():
            raise LayoutError("no groups were found for these servers and domains.")
        members = self.members.copy()
        changed = np.flatnonzero((members != self.before).any(axis=1))
        for span in self.spans[:EITHER]:
            now, old = self.members[changed, span], self.before[changed, span]
            same = now[:, :, None] == old[:, None, :]
            # Group by group there are as many newcomers as positions that somebody left.
            old[~same.any(axis=1)] = now[~same.any(axis=2)]
            members[changed, span] = old
        return self.places[members].astype(np.int32)


def count_meetings(some: Ints, others: Ints, total: int) -> Ints:
    """In how many groups a of `some` meets b of `others`, int64 [total, total]."""
    both = some[:, :, None] * total + others[:, None, :]
    return np.bincount(both.ravel(), minlength=total * total).reshape(total, total)


def _walk_back(parents: list[dict[int, int]], end: int) -> list[tuple[int, int]]:
    chain: list[tuple[int, int]] = []
    for parent in reversed(parents):
        chain.append((parent[end], end))
        end = parent[end]
    return chain[::-1]
