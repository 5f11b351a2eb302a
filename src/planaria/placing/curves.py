"""From how often rows were met in a sample to which share of all accesses the hottest ones take.

Whoever ranks rows by a sample and reads their share off the same sample deceives himself: the rows
that luck met often stand on top, and those that it missed seem never to be used. So the curve is
that of Good and Turing, in its form for sums: leave one access out, and it is on a row that the
others met c times or more exactly if all of them met that row c + 1 times or more. Hence

    the rows that were met c times or more take the share of accesses
    that the sample has on rows that were met c + 1 times or more

and rows that were never met take what the sample has on rows met once. Those are all alike to
whoever knows only the sample, so their share is spread over them evenly.

Beside this curve of what is *known* stands that of what would be known of all data: a tail
i^-exponent behind the rows met TRUSTED times or more, with the mass that they leave, bent so that
such a sample would meet as many distinct rows of it as this one has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planaria.kernels.types import Index
from planaria.placing.costs import Numbers
from planaria.placing.filling import lower_hull

STEPS = 100
TRUSTED = 8
PIECES = 400  # of a tail, in which all rows count as equally hot
STEEPEST = 4.0


def knots(rows: int, steps: int = STEPS) -> Index:
    """Numbers of hot rows, from 0 to all: geometric, because heat falls by powers of the rank."""
    found: Index = np.unique(np.round(np.geomspace(1, rows, steps)).astype(np.int64))
    return np.concatenate([[0], found])


def known_share(
    counts: Index, rows_with: Numbers, rows: int, identified: int, at: Index
) -> Numbers:
    """The share of all accesses on the `at` rows that were met most often.

    counts, descending, and how many rows have each. identified: of so many the numbers are known;
    the others are like those that were never met.
    """
    accesses = float(counts @ rows_with)
    if not accesses:
        return at / rows
    met = np.cumsum(rows_with)
    share = np.cumsum(counts * rows_with) / accesses
    below = np.append(counts[1:], 0)
    # Where no row has one access less, those met `counts - 1` times or more are the same rows.
    alone = (counts - below > 1) | (met >= rows)
    x = np.concatenate([[0.0], np.minimum(met, rows), np.minimum(met[alone], rows), [rows]])
    y = np.concatenate([[0.0], np.append(0.0, share[:-1]), share[alone], [1.0]])
    order = np.lexsort((-y, x))
    x, y = x[order], y[order]
    first = np.append(True, np.diff(x) > 0)
    x, y = x[first], y[first]
    if identified < rows:
        least = float(np.interp(identified, x, y))
        keep = x < identified
        x, y = np.append(x[keep], [identified, rows]), np.append(y[keep], [least, 1.0])
    corners = lower_hull(x, -y)  # hotter rows come first, whatever luck says
    found: Numbers = np.interp(at, x[corners], y[corners])
    return found


@dataclass(frozen=True)
class Tail:
    """Behind the first `start` rows, row i, counted from 1 by heat, takes a part as i^-exponent."""

    start: int  # rows in front of it
    share: float  # of accesses, that they take
    exponent: float
    rows: int

    def share_of(self, hot: Index, known: Numbers) -> Numbers:
        """The share of the hottest `hot` rows if all data were known; up to `start` as it is."""
        total = _power_sum(self.rows, self.exponent) - _power_sum(self.start, self.exponent)
        inside = _power_sum(np.maximum(hot, self.start), self.exponent)
        part = (inside - _power_sum(self.start, self.exponent)) / (total or 1.0)
        fitted = np.where(hot <= self.start, known, self.share + (1 - self.share) * part)
        return np.maximum(fitted, known)

    def distinct(self, accesses: float) -> float:
        """How many rows of the tail so many accesses meet."""
        edges = np.unique(np.geomspace(self.start + 1, self.rows + 1, PIECES).astype(np.int64))
        cumulated = _power_sum(edges - 1, self.exponent)
        total = _power_sum(self.rows, self.exponent) - _power_sum(self.start, self.exponent)
        each = np.diff(edges)
        mass = (1 - self.share) * np.diff(cumulated) / (total or 1.0)
        return float(each @ -np.expm1(-accesses * mass / each))


def fitted_tail(counts: Index, rows_with: Numbers, rows: int, at: Index, known: Numbers) -> Tail:
    """at, known: the curve of what is known."""
    accesses = float(counts @ rows_with)
    trusted = counts >= TRUSTED
    start = min(int(rows_with[trusted].sum()), rows)
    share = float(np.interp(start, at, known))
    wanted = float(rows_with[~trusted].sum())
    low, high = 0.0, STEEPEST
    for _ in range(50):
        middle = (low + high) / 2
        # The steeper, the fewer rows are met.
        many = Tail(start, share, middle, rows).distinct(accesses) > wanted
        low, high = (middle, high) if many else (low, middle)
    return Tail(start, share, high if wanted else 0.0, rows)


_EXACT = 1000  # terms that are added one by one; behind them the integral is as good


def _power_sum(n: int | Index, exponent: float) -> Numbers:
    """The sum of i^-exponent for i from 1 to n."""
    n = np.asarray(n, np.float64)
    first = np.append(0.0, np.cumsum(np.arange(1, _EXACT + 1, dtype=np.float64) ** -exponent))
    few = first[np.minimum(n, _EXACT).astype(np.int64)]
    a, b = _EXACT + 0.5, np.maximum(n, _EXACT) + 0.5
    if abs(exponent - 1) < 1e-9:
        many = np.log(b / a)
    else:
        many = (b ** (1 - exponent) - a ** (1 - exponent)) / (1 - exponent)
    return few + many
