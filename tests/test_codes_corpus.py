"""The format of parity, held for ever.

Parity lies on disks and crosses wires between versions: another matrix, however good, would decode
it to garbage. tests/corpus/codes.json was written once, by `python tests/test_codes_corpus.py`, and
must never be written again; when a test below fails, the code is wrong, not the file.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planaria.codes import COEFFICIENTS, Code
from planaria.kernels import field
from planaria.kernels.types import Bytes

CORPUS = Path(__file__).parent / "corpus" / "codes.json"

CORPUS_CODES = [
    *[(1, 1), (1, 4), (2, 1), (3, 3), (4, 2), (5, 1), (8, 2), (10, 4), (12, 3), (16, 1)],
    *[(33, 2), (63, 3), (64, 1), (64, 4)],
]


@lru_cache
def corpus_data(k: int, r: int, length: int) -> Bytes:
    """uint8[k, length] from Knuth's MMIX generator: the top byte of each state, seed 100 k + r."""
    state, found = 100 * k + r, bytearray()
    for _ in range(k * length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        found.append(state >> 56)
    return np.frombuffer(bytes(found), np.uint8).reshape(k, length)


def corpus_vector(k: int, r: int) -> dict[str, Any]:
    short, long = corpus_data(k, r, 33), corpus_data(k, r, 1025)
    return {
        "k": k,
        "r": r,
        "data_33_begins": short.tobytes()[:16].hex(),
        "data_1025_sha256": hashlib.sha256(long.tobytes()).hexdigest(),
        "parity_33": [shard.tobytes().hex() for shard in Code(k, r).encode(list(short))],
        "parity_1025_sha256": [
            hashlib.sha256(shard.tobytes()).hexdigest() for shard in Code(k, r).encode(list(long))
        ],
    }


def corpus() -> dict[str, Any]:
    """What the file would be if today's code wrote it."""
    return {
        "note": "Frozen: parity as the first release wrote it. Never regenerate this file.",
        "polynomial": hex(field.POLYNOMIAL),
        "coefficients": [row.tobytes().hex() for row in COEFFICIENTS],
        "vectors": [corpus_vector(k, r) for k, r in CORPUS_CODES],
    }


def test_parity_is_to_the_bit_what_the_first_release_wrote(level: str) -> None:
    assert corpus() == json.loads(CORPUS.read_text())


def test_shards_that_the_first_release_wrote_decode_to_their_data() -> None:
    for vector in json.loads(CORPUS.read_text())["vectors"]:
        code = Code(vector["k"], vector["r"])
        shards = dict(enumerate(corpus_data(code.k, code.r, 33)))
        for j, written in enumerate(vector["parity_33"]):
            shards[code.k + j] = np.frombuffer(bytes.fromhex(written), np.uint8)
        lost = {number: shards.pop(number) for number in range(min(code.k, code.r))}
        rebuilt = code.reconstruct(shards)
        assert rebuilt.keys() == lost.keys()
        assert all(np.array_equal(rebuilt[number], lost[number]) for number in lost)


def test_control_another_matrix_that_is_as_good_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    mirrored = np.ascontiguousarray(COEFFICIENTS[:, ::-1])  # MDS too, with a row of ones
    monkeypatch.setattr("planaria.codes.code.COEFFICIENTS", mirrored)
    written = json.loads(CORPUS.read_text())
    differing = [
        (vector["k"], vector["r"])
        for vector in written["vectors"]
        if corpus_vector(vector["k"], vector["r"]) != vector
    ]
    assert differing == [(k, r) for k, r in CORPUS_CODES if r > 1]


if __name__ == "__main__":
    with CORPUS.open("x") as file:  # refuses where the file is: it is written once
        json.dump(corpus(), file, indent=1)
        file.write("\n")
