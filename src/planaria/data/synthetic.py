"""Samples shaped like Criteo's, with a planted model behind the clicks.

Every sample is a pure function of (seed, tables, exponent, sample number): counters go through
SplitMix64's finalizer, and from there on only integers are added and multiplied, or doubles go
through + - * / and square root. No libm, no BLAS, no order of summation: a replacement on another
kind of CPU reads the same bits.

- **Ids** follow a bounded Zipf law, P(rank) ~ rank^-exponent, by the inverse of its distribution
  function, drawn as `KNOTS` straight pieces. A bijection then spreads hot ranks over the table.
- **Dense features** are sums of four uniform numbers, cut off at zero: 0 to 6, mean 2, and 4 % are
  exactly zero.
- **Labels** are Bernoulli(sigmoid(score)). Each (table, row) has a hidden effect and a hidden
  factor, both roughly normal; the score adds up weighted effects, products of the factors of up
  to `PAIRS` pairs of tables, and weighted dense features. It is then scaled and shifted, so that
  whatever the tables the click rate is `CLICK_RATE` and the planted model's own AUC about 0.80.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, sqrt

import numpy as np
from numpy.typing import NDArray

from planaria.data.source import DENSE_FEATURES, Batch, check_range, check_tables
from planaria.errors import ArgumentError
from planaria.kernels.twin_numbers import GOLDEN, log_exact, mix
from planaria.kernels.types import Index, Keys

CLICK_RATE = 0.25
LOGIT_STD = 1.4  # gives the planted model an AUC of about 0.80 at that click rate
PAIRS = 8
KNOTS = 1024
BLOCK = 512  # samples made at once, so that temporaries stay in the cache
CALIBRATION_START = 2**62  # samples that no reader can ask for
CALIBRATION_COUNT = 16384

_KNOT_SHIFT = np.uint64(54)
_LOW_52_BITS = np.uint64(2**52 - 1)
_ONE = np.uint64(0x3FF0000000000000)  # the bits of 1.0
_QUARTERS = np.uint64(0x0000FFFF0000FFFF)
_LEVELS_PER_LOGIT = 256
_LEVELS = 16 * _LEVELS_PER_LOGIT  # logits from -8 to 8

Doubles = NDArray[np.float64]


class Synthetic:
    """A source of `samples` samples, or of endlessly many."""

    def __init__(
        self,
        tables: Sequence[int] = (10_000,) * 26,
        *,
        seed: int = 0,
        exponent: float = 1.05,
        samples: int | None = None,
    ) -> None:
        self.tables = check_tables(tables)
        self.samples = samples
        if not 0 <= seed < 2**64:
            raise ArgumentError(f"seed must be between 0 and 2^64 - 1, not {seed}")
        if not 0 <= exponent <= 1.5:
            raise ArgumentError(f"exponent must be between 0 and 1.5, not {exponent}")
        if samples is not None and samples < 0:
            raise ArgumentError(f"samples must be 0 or more, or None for no end, not {samples}")
        self._seed_key = mix(np.array([seed], np.uint64) + GOLDEN)
        self._ids = _IdLaw(self.tables, exponent, self._keys(1, len(tables)))
        self._model = _PlantedModel(self._keys(2, len(tables)), self._keys(3, DENSE_FEATURES))
        # Lane 0 decides the label, then come the dense features, then the tables.
        self._lanes = self._keys(4, 1 + DENSE_FEATURES + len(tables))[:, None]
        self._model.calibrate(self._raw_scores(CALIBRATION_START, CALIBRATION_COUNT))

    def read(self, start: int, count: int) -> Batch:
        count = self._available(start, count)
        batch = Batch(
            np.empty((count, DENSE_FEATURES), np.float32),
            np.empty((count, len(self.tables)), np.int64),
            np.empty(count, np.float32),
        )
        for at in range(0, count, BLOCK):
            size = min(BLOCK, count - at)
            words = self._words(start + at, size)
            dense, rows = (
                _dense(words[1 : 1 + DENSE_FEATURES]),
                self._ids.rows(words[1 + DENSE_FEATURES :]),
            )
            chance = self._model.chance(self._model.raw_scores(dense, rows))
            block = slice(at, at + size)
            np.multiply(dense.T, np.float32(2.0**-15), out=batch.dense[block], casting="unsafe")
            batch.ids[block] = rows.T
            batch.labels[block] = (words[0] >> np.uint64(32)).view(np.int64) < chance
        return batch

    def click_chance(self, start: int, count: int) -> Doubles:
        """The planted model's click probabilities: no model can predict these labels better."""
        raw_scores = self._raw_scores(start, self._available(start, count))
        return np.ldexp(self._model.chance(raw_scores).astype(np.float64), -32)

    def _available(self, start: int, count: int) -> int:
        check_range(start, count)
        return count if self.samples is None else max(0, min(count, self.samples - start))

    def _keys(self, purpose: int, count: int) -> Keys:
        """Distinct random words, uint64[count]."""
        start = mix(self._seed_key + np.uint64(purpose))
        return mix(start + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)

    def _words(self, start: int, count: int) -> Keys:
        """The random words of samples, uint64[lanes, count]."""
        numbers = np.arange(start, start + count, dtype=np.int64).view(np.uint64)
        return mix(mix(self._seed_key + numbers * GOLDEN)[None, :] + self._lanes)

    def _raw_scores(self, start: int, count: int) -> Index:
        scores = np.empty(count, np.int64)
        for at in range(0, count, BLOCK):
            words = self._words(start + at, min(BLOCK, count - at))
            dense, rows = (
                _dense(words[1 : 1 + DENSE_FEATURES]),
                self._ids.rows(words[1 + DENSE_FEATURES :]),
            )
            scores[at : at + BLOCK] = self._model.raw_scores(dense, rows)
        return scores


class _IdLaw:
    """From random words to row numbers."""

    def __init__(self, tables: Sequence[int], exponent: float, keys: Keys) -> None:
        sizes = sorted(set(tables))
        knots = np.stack([_zipf_knots(rows, exponent) for rows in sizes])
        widths = np.diff(knots)
        # The fraction comes as 1.0 to 2.0, hence the start one width early.
        self._starts = (knots[:, :-1] - widths).ravel()
        self._widths = widths.ravel()
        first = [sizes.index(rows) * KNOTS for rows in tables]
        self._first_knots = np.array(first, np.int64)[:, None]
        self._rows = np.array(tables, np.uint64)[:, None]
        self._last_ranks = self._rows.view(np.int64) - 1
        self._strides = np.array([_stride(rows) for rows in tables], np.uint64)[:, None]
        self._offsets = keys[:, None] % self._rows

    def rows(self, words: Keys) -> Index:
        """int64[tables, n] from uint64[tables, n]: 10 bits choose the piece, 52 the place in it."""
        piece = (words >> _KNOT_SHIFT).view(np.int64)
        piece += self._first_knots
        rank = ((words & _LOW_52_BITS) | _ONE).view(np.float64)
        rank *= self._widths.take(piece)
        rank += self._starts.take(piece)
        whole: Index = rank.astype(np.int64)
        np.minimum(whole, self._last_ranks, out=whole)
        row = whole.view(np.uint64)
        row *= self._strides
        row += self._offsets
        row %= self._rows
        return row.view(np.int64)


class _PlantedModel:
    """From dense features and rows to the chance of a click, all in integers."""

    def __init__(self, table_keys: Keys, dense_keys: Keys) -> None:
        tables, pairs = len(table_keys), min(PAIRS, len(table_keys) // 2)
        self._table_keys = table_keys[:, None]
        self._table_weights = _small_weights(table_keys)[:, None]
        order = np.argsort(table_keys)
        self._left, self._right = order[0 : 2 * pairs : 2], order[1 : 2 * pairs : 2]
        # Shares of the score's variance: effects about 0.55, pairs 0.2, dense features 0.25.
        self._pair_weight = int(133 * sqrt(tables / max(pairs, 1)))
        dense_unit = 0.67 * sqrt(tables / DENSE_FEATURES)
        sign = np.where(dense_keys >> np.uint64(63), 1, -1)
        weights: Index = (sign * _small_weights(dense_keys) * dense_unit).astype(np.int64)
        self._dense_weights = weights[:, None]
        self._mean, self._scale, self._shift = 0, 0, 0
        logits = (np.arange(_LEVELS) - _LEVELS // 2 + 0.5) / _LEVELS_PER_LOGIT
        self._chances = (2.0**32 / (1.0 + _exp(-logits))).astype(np.int64)

    def raw_scores(self, dense: Index, rows: Index) -> Index:
        """int64[n] from int64[13, n] and int64[tables, n]."""
        hidden = mix(rows.view(np.uint64) + self._table_keys)
        halves = (hidden & _QUARTERS) + ((hidden >> np.uint64(16)) & _QUARTERS)
        low = (halves & np.uint64(0xFFFFFFFF)).view(np.int64)
        high = (halves >> np.uint64(32)).view(np.int64)
        score: Index = ((low + high) * self._table_weights).sum(axis=0)
        score += (dense * self._dense_weights).sum(axis=0)
        # low + high and low - high are uncorrelated: an effect and a factor from one word.
        left = low[self._left] - high[self._left]
        right = low[self._right] - high[self._right]
        score += (left * right >> 16).sum(axis=0) * self._pair_weight
        return score

    def calibrate(self, raw_scores: Index) -> None:
        """Scales and shifts from now on, so that these scores have the wanted spread and rate."""
        self._mean = int(raw_scores.sum()) // len(raw_scores)
        squares = int(np.square(raw_scores - self._mean >> 8).sum())  # >> 8: no overflow
        std = sqrt(squares / len(raw_scores)) * 2**8
        self._scale = int(LOGIT_STD * _LEVELS_PER_LOGIT * 2**32 / std)
        wanted = int(CLICK_RATE * 2**32) * len(raw_scores)
        low, high = -_LEVELS // 2, _LEVELS // 2
        while high - low > 1:
            self._shift = (low + high) // 2
            if int(self.chance(raw_scores).sum()) < wanted:
                low = self._shift
            else:
                high = self._shift
        self._shift = high

    def chance(self, raw_scores: Index) -> Index:
        """Click probability times 2^32, int64[n]."""
        level = (raw_scores - self._mean) * self._scale >> 32
        level += self._shift + _LEVELS // 2
        chances: Index = self._chances.take(level, mode="clip")
        return chances


def _dense(words: Keys) -> Index:
    """Dense features times 2^15, int64[13, n]: the sum of a word's quarters, cut off below 1."""
    halves = (words & _QUARTERS) + ((words >> np.uint64(16)) & _QUARTERS)
    total = (halves & np.uint64(0xFFFFFFFF)) + (halves >> np.uint64(32))
    dense: Index = total.view(np.int64) - 65536
    return np.maximum(dense, 0, out=dense)


def _small_weights(keys: Keys) -> Index:
    """64 to 191, one for each key."""
    weights: Index = (keys % np.uint64(128)).astype(np.int64) + 64
    return weights


def _stride(rows: int) -> int:
    """What consecutive ranks lie apart: coprime to `rows`, so that row = rank * stride is one to
    one, and to small numbers, so that hot rows visit all servers whatever k is."""
    stride = min(rows, 2**23) * 5 // 8 + 1  # at most 2^23, so that rank * stride stays below 2^63
    while gcd(stride, rows * 2 * 3 * 5 * 7 * 11 * 13) > 1:
        stride += 1
    return stride


def _zipf_knots(rows: int, exponent: float) -> Doubles:
    """KNOTS + 1 ranks that cut the Zipf law into pieces of equal probability; from 0 to `rows`.

    Rank i takes the integral of x^-exponent from i + 0.5 to i + 1.5. At exponent 1 that is 10 %
    above Zipf's (i + 1)^-exponent for the first rank, 2 % for the second, and nothing beyond.
    """
    share = np.arange(KNOTS + 1) / KNOTS
    ends = log_exact(np.array([0.5, rows + 0.5]))
    power = 1.0 - exponent
    if abs(power) < 1e-6:
        knots = _exp(ends[0] + share * (ends[1] - ends[0]))
    else:
        low, high = _exp(power * ends)
        knots = _exp(log_exact(low + share * (high - low)) / power)
    knots -= 0.5
    knots[0], knots[-1] = 0.0, rows
    return knots


def _exp(x: Doubles) -> Doubles:
    """e ** x from + - * / alone, for |x| < 700, good to about 1e-13."""
    twos = np.rint(x * 1.4426950408889634)
    rest = x - twos * 0.6931471805599453
    series = np.ones_like(x)
    for n in range(18, 0, -1):
        series = series * rest / n + 1.0
    result: Doubles = np.ldexp(series, twos.astype(np.int32))
    return result
