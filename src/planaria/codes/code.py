"""The code of one stripe: k data shards, r parity shards, any r of the k + r can be lost.

The four verbs are `encode`, `update` (a delta into parity), `verify` and `reconstruct`. Shards are
bytes of equal length; what they mean is never looked at, so a code is exact for any optimizer and
any dtype, for ever.

One table of coefficients serves every (k, r): parity j of data shard i is multiplied by
COEFFICIENTS[j, i], whatever k and r are. It is a Cauchy matrix, 1 / (x_j + y_i) with x_j = 64 + j
and y_i = i, whose columns are scaled so that row 0 is all ones: the first parity is the plain XOR.
Every square submatrix of a Cauchy matrix is regular, and scaling columns keeps that, so the code
is MDS. The coefficients are part of the format of parity on disk and on the wire: they never
change, and a frozen corpus in the tests holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planaria import kernels
from planaria.errors import CodeError
from planaria.kernels import field
from planaria.kernels.checks import array, arrays, require_apart
from planaria.kernels.types import Bytes
from planaria.layout.groups import MAX_K, MAX_R


def _coefficients() -> NDArray[np.uint8]:
    table = np.empty((MAX_R, MAX_K), np.uint8)
    for j in range(MAX_R):
        for i in range(MAX_K):
            table[j, i] = field.multiply(64 ^ i, field.inverse((64 + j) ^ i))
    table.flags.writeable = False
    return table


COEFFICIENTS: NDArray[np.uint8] = _coefficients()
"""uint8[MAX_R, MAX_K]; parity j of a stripe is the sum over i of COEFFICIENTS[j, i] * data i."""


class Code:
    """An MDS code of k data and r parity shards. Shard numbers 0..k-1 are data, then parity."""

    def __init__(self, k: int, r: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= MAX_K:
            raise CodeError(f"k must be a whole number between 1 and {MAX_K}, not {k!r}")
        if isinstance(r, bool) or not isinstance(r, int | np.integer) or not 0 <= r <= MAX_R:
            raise CodeError(f"r must be a whole number between 0 and {MAX_R}, not {r!r}")
        self.k = int(k)
        self.r = int(r)

    def __repr__(self) -> str:
        return f"Code(k={self.k}, r={self.r})"

    def encode(self, data: Sequence[Bytes], out: Sequence[Bytes] | None = None) -> list[Bytes]:
        """The r parity shards of k data shards, written to `out` where it is given."""
        self._check_count("data shards", data, self.k)
        _check_shards("data", data)
        if out is None:
            out = [np.empty_like(data[0]) for _ in range(self.r)]
        self._check_count("parity buffers", out, self.r)
        if self.r:
            kernels.combine(data, out, self._parity_rows())
        return list(out)

    def update(self, parity: Sequence[Bytes], position: int, delta: Bytes) -> None:
        """Brings all parity shards up to date in place after data shard `position` changed.

        delta = old XOR new of that shard. Applying the same delta again undoes it.
        """
        self._check_count("parity shards", parity, self.r)
        if not 0 <= position < self.k:
            raise CodeError(f"data shards are numbered 0 to {self.k - 1}; there is no {position}")
        _check_shards("delta", [delta])
        arrays("parity", parity, np.uint8, 1, shape=delta.shape, writable=True)
        require_apart(parity, [delta])
        for j, shard in enumerate(parity):
            kernels.mul_add_bytes(shard, int(COEFFICIENTS[j, position]), delta)

    def verify(self, data: Sequence[Bytes], parity: Sequence[Bytes]) -> bool:
        """Whether the parity shards are those of the data shards, byte for byte."""
        self._check_count("parity shards", parity, self.r)
        _check_shards("data and parity", [*data, *parity])
        return all(
            np.array_equal(expected, shard)
            for expected, shard in zip(self.encode(data), parity, strict=True)
        )

    def reconstruct(
        self, shards: Mapping[int, Bytes], wanted: Sequence[int] | None = None
    ) -> dict[int, Bytes]:
        """The wanted shards (default: all absent ones) from any k that are left.

        shards: number -> bytes of those that are left; of more than k, the first k by number are
        used. Nothing but the wanted shards is computed.
        """
        if wanted is None:
            wanted = [number for number in range(self.k + self.r) if number not in shards]
        _check_shards("shards", list(shards.values()))
        have = sorted(shards)
        rows = self.decoding_rows(tuple(have), tuple(wanted))
        inputs = [shards[number] for number in have[: self.k]]
        outputs = [np.empty_like(inputs[0]) for _ in wanted]
        for first in range(0, len(wanted), MAX_R):
            some = slice(first, first + MAX_R)
            kernels.combine(inputs, outputs[some], np.ascontiguousarray(rows[some]))
        return dict(zip(wanted, outputs, strict=True))

    def decoding_rows(self, have: tuple[int, ...], wanted: tuple[int, ...]) -> NDArray[np.uint8]:
        """uint8[wanted, k]: the wanted shards are these combinations of the shards in `have`."""
        total = self.k + self.r
        for number in (*have, *wanted):
            if not 0 <= number < total:
                raise CodeError(f"shards are numbered 0 to {total - 1}; there is no {number}")
        if len(set(have)) != len(have) or len(have) < self.k:
            raise CodeError(
                f"{len(set(have))} of {total} shards are left and {self.k} different ones are "
                f"needed: {self!r} survives the loss of {self.r}"
            )
        return _decoding_rows(self.k, self.r, have[: self.k], wanted)

    def _parity_rows(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(COEFFICIENTS[: self.r, : self.k])

    def _check_count(self, what: str, shards: Sequence[Bytes], count: int) -> None:
        if len(shards) != count:
            raise CodeError(f"{self!r} takes {count} {what}, not {len(shards)}")


def _check_shards(what: str, shards: Sequence[Bytes]) -> None:
    if not shards:
        return
    array(f"{what}[0]", shards[0], np.uint8, 1)
    arrays(what, shards, np.uint8, 1, shape=shards[0].shape)


@lru_cache(maxsize=4096)
def _decoding_rows(
    k: int, r: int, have: tuple[int, ...], wanted: tuple[int, ...]
) -> NDArray[np.uint8]:
    generator = np.concatenate([np.eye(k, dtype=np.uint8), COEFFICIENTS[:r, :k]])
    rows = field.matmul(generator[list(wanted)], field.invert(generator[list(have)]))
    rows.flags.writeable = False
    return rows
