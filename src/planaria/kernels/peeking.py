"""Reading what another process of this machine holds, checked: without its help, and without its
memory being mapped. What planaria.kernels promises of its functions holds for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from planaria import kernels
from planaria.kernels import twin_peeking
from planaria.kernels.checks import array, require
from planaria.kernels.types import Bytes, Keys

COUNTER_WORDS = 2  # a key that nobody else has, and the count


class Source(NamedTuple):
    """Bytes of a process, what they are multiplied by, and where it counts what it does to them."""

    process: int
    at: int
    counter: int
    key: int
    counted: int
    coef: int


def _backend() -> Any:
    return twin_peeking if kernels.level() == "numpy" else kernels.native


def peek(sources: Sequence[Source], out: Bytes) -> int:
    """out = the sum of coef times source, over GF(2^8), if that is what it was when it was counted.

    Returns 0; or i + 1 if source i has changed since, or -(i + 1) if it cannot be read, or is
    somebody else's by now. Then `out` is anything.
    """
    require(len(sources) > 0, "peek needs at least one source")
    for source in sources:
        require(
            0 < source.process < 2**31
            and 0 <= source.coef <= 255
            and all(0 <= number < 2**64 for number in source[1:5]),
            f"{source} is no memory of a process",
        )
    array("out", out, np.uint8, 1, writable=True)
    found: int = _backend().peek([tuple(source) for source in sources], out)
    return found


def count_change(counter: Keys) -> None:
    """To be called before and after bytes are changed that others may peek at: while the count is
    odd, they are being changed.
    """
    array("counter", counter, np.uint64, 1, shape=(COUNTER_WORDS,), writable=True)
    _backend().count_change(counter)


def address_of(memory: Any) -> int:
    """Of an array, for a source."""
    return int(memory.ctypes.data)
