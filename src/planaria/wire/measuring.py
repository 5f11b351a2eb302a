"""What encoders do with rows here, and how fast bytes pass: what their choice is made by."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from planaria.kernels import lossy
from planaria.kernels.lossy import Measured
from planaria.kernels.types import Floats

Result = TypeVar("Result")
CODERS = ("none", "huffman", "vector-lz", "zstd", "lz4")
ROUNDS = 3  # of which the fastest counts: others may have been disturbed
PROBE_BYTES = 32 << 20
PIECE_BYTES = 1 << 20


def candidates() -> list[str]:
    """Those that can be had here."""
    return [name for name in CODERS if name in lossy.available()]


def measure(rows: Floats, bound: float, encoders: Sequence[str]) -> dict[str, Measured]:
    """Of some rows of one table, float32[n, dim], by encoder."""
    tables = np.zeros(len(rows), np.int32)
    bounds = np.full(1, bound, np.float32)
    out = np.empty_like(rows)
    found = {}
    for name in encoders:
        encode_s, frame = _fastest(partial(lossy.encode, rows, tables, bounds, [name]))
        decode_s, _ = _fastest(partial(lossy.decode, frame, tables, rows.shape[1], out))
        found[name] = Measured(
            rows.nbytes / frame.nbytes, rows.nbytes / encode_s, rows.nbytes / decode_s
        )
    return found


def loopback_bytes_per_s() -> float:
    """How fast bytes pass between two processes of one machine."""
    ours, theirs = socket.socketpair()
    piece = bytes(PIECE_BYTES)

    def send() -> None:
        for _ in range(PROBE_BYTES // PIECE_BYTES):
            ours.sendall(piece)

    with ours, theirs:
        sender = threading.Thread(target=send, daemon=True)
        began, left = time.perf_counter(), PROBE_BYTES
        sender.start()
        while left:
            left -= len(theirs.recv(PIECE_BYTES))
        sender.join()
        return PROBE_BYTES / (time.perf_counter() - began)


def _fastest(work: Callable[[], Result]) -> tuple[float, Result]:
    best, result = float("inf"), work()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - began)
    return max(best, 1e-9), result
