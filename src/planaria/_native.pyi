"""The native module. Call it through planaria.kernels, which checks the arrays first; what each
function computes stands in planaria/kernels/twin.py, for saves in twin_saves.py, for lossy lookups
in twin_lossy.py, for packed arrays in twin_packing.py, for tiers in twin_tiers.py, for peeking in
twin_peeking.py."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planaria.kernels.types import Bytes, Floats, Index, Keys, OptimizerRule, Records

def set_threads(count: int, /) -> None: ...
def threads() -> int: ...
def level() -> str: ...
def level_supported(name: str, /) -> bool: ...
def select_level(name: str, /) -> bool: ...
def allocate(rows: int, words: int, huge: bool) -> Records: ...
def gather(records: Records, index: Index, out: Records, /) -> None: ...
def scatter(records: Records, index: Index, values: Records, /) -> None: ...
def mul_add(records: Records, index: Index, coef: Bytes | None, delta: Records) -> None: ...
def add_delta(
    records: Records,
    index: Index,
    slots: int,
    by_region: Bytes,
    delta: Records,
    coef: Bytes,
    valid: Bytes | None,
) -> bool: ...
def share_deltas(
    index: Index,
    delta: Records,
    slots: int,
    holder: NDArray[np.int32],
    region: NDArray[np.int32],
    out_index: Index,
    out_delta: Records,
    counts: Index,
    /,
) -> None: ...
def mul_add_bytes(target: Bytes, coef: int, delta: Bytes, /) -> None: ...
def undo(
    values: Records, query: Index, index: Index, coef: Bytes | None, delta: Records
) -> None: ...
def combine(
    inputs: Sequence[Bytes], outputs: Sequence[Bytes], coef: NDArray[np.uint8], /
) -> None: ...
def apply(
    rule: OptimizerRule,
    records: Records,
    limit: int,
    dim: int,
    indices: Sequence[Index],
    grads: Sequence[Floats],
    index_out: Index,
    delta: Records,
    /,
) -> int: ...
def init_records(
    seed: int,
    table_ids: Index,
    first_rows: Index,
    distributions: Index,
    parameters: Floats,
    rows: int,
    row: Index,
    state: NDArray[np.uint32],
    out: Records,
    /,
) -> None: ...
def digest(records: Records, keys: Keys, /) -> tuple[int, int]: ...
def check_distinct(index: Index, limit: int, /) -> None: ...
def missing(bitmap: Bytes, index: Index, out: Index, /) -> int: ...
def mark(bitmap: Bytes, index: Index, /) -> None: ...
def peek(sources: Sequence[tuple[int, int, int, int, int, int]], out: Bytes, /) -> int: ...
def count_change(counter: Keys, /) -> None: ...
def dedup(ids: Index, unique: Index, inverse: Index, /) -> int: ...
def partition(
    rows: Index,
    arena_rows: int,
    place: NDArray[np.int32],
    region: NDArray[np.int32],
    slots: int,
    order: Index,
    index: Index,
    counts: Index,
    /,
) -> None: ...
def gradient_sum(grads: Floats, inverse: Index, out: Floats, /) -> None: ...
def number_bags(
    ids: Index,
    offsets: Index,
    samples: int,
    keys: Index,
    limits: Index,
    first_rows: Index,
    rows: Index,
    inverse: Index,
    bags: Index,
    /,
) -> int: ...
def pool(
    values: Floats,
    index: Index,
    offsets: Index,
    weights: Floats | None,
    poolings: Index,
    columns: Index,
    prefetch_rows: int,
    out: Floats,
) -> None: ...
def pool_backward(
    grads: Floats,
    inverse: Index,
    offsets: Index,
    weights: Floats | None,
    poolings: Index,
    columns: Index,
    out: Floats,
) -> None: ...
def weight_backward(
    grads: Floats, values: Floats, index: Index, offsets: Index, columns: Index, out: Floats, /
) -> None: ...
def interact(first: Floats | None, rest: Floats, out: Floats) -> None: ...
def interact_backward(
    grads: Floats, first: Floats | None, rest: Floats, of_first: Floats | None, of_rest: Floats
) -> None: ...
def quantise(records: Records, segments: Index, bits: int, out: Bytes, /) -> None: ...
def dequantise(packed: Bytes, segments: Index, bits: int, out: Records, /) -> None: ...
def row_distances(records: Records, saved: Records, dim: int, out: Floats, /) -> None: ...
def count_accesses(counters: Records, index: Index, /) -> None: ...
def reset_counters(counters: Records, index: Index, /) -> None: ...
def top_rows(scores: Records, out: Index, /) -> None: ...
def sample_accesses(
    entries: Records, bitmap: Bytes, progress: Keys, seed: int, index: Index, /
) -> None: ...
def count_marked(bitmap: Bytes, first: int, stop: int, /) -> int: ...
def marked(bitmap: Bytes, first: int, stop: int, out: Index, /) -> None: ...
def preserve(
    bitmap: Bytes,
    first: int,
    stop: int,
    index: Index,
    records: Records,
    delta: Records,
    out_index: Index,
    out_records: Records,
    /,
) -> int: ...
def overlay(chunk: Records, first: int, index: Index, values: Records, /) -> None: ...
def crc32(content: Bytes, before: int, /) -> int: ...

class Inflater:
    def run(
        self, packed: Bytes, valid: int, bit: int, text: Bytes, at: int, pause_from: int, /
    ) -> tuple[int, int, int]: ...

def encode_rows(
    values: Floats, tables: NDArray[np.int32], scales: Floats, encoders: Bytes, out: Bytes, /
) -> int: ...
def decode_rows(frame: Bytes, tables: NDArray[np.int32], count: int, out: Floats, /) -> None: ...
def pack_words(records: Records, out: Bytes, /) -> int: ...
def pack_numbers(numbers: Index, out: Bytes, /) -> int: ...
def unpack_words(frame: Bytes, out: Records, /) -> bool: ...
def unpack_numbers(frame: Bytes, out: Index, /) -> bool: ...
def locate_slots(
    slot_of: NDArray[np.int32],
    owner: NDArray[np.int32],
    pin: NDArray[np.uint32],
    ticket: NDArray[np.uint64],
    uses: Bytes,
    index: Index,
    call: int,
    slots: Index,
    missing: Index,
    /,
) -> tuple[int, int]: ...
def claim_slots(
    slot_of: NDArray[np.int32],
    owner: NDArray[np.int32],
    pin: NDArray[np.uint32],
    ticket: NDArray[np.uint64],
    uses: Bytes,
    call: int,
    done: int,
    hand: int,
    slots: Index,
    /,
) -> tuple[int, int]: ...

class ColdFile:
    def __init__(
        self, descriptor: int, record_bytes: int, stride: int, threads: int, room: int, /
    ) -> None: ...
    def write(
        self, records: Index, slots: Index, values: Records, sums: NDArray[np.uint32], /
    ) -> None: ...
    def read(
        self, records: Index, slots: Index, values: Records, sums: NDArray[np.uint32], /
    ) -> int: ...
    def write_range(self, first: int, values: Records, sums: NDArray[np.uint32], /) -> None: ...
    def read_range(self, first: int, values: Records, sums: NDArray[np.uint32], /) -> None: ...
    def wait(self, ticket: int, /) -> None: ...
    def settle(self) -> None: ...
    def done(self) -> int: ...
    def failure(self) -> tuple[bool, int, int] | None: ...
