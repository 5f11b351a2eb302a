"""Whether all ranks hold the same: a mark of each object that is kept, told with the next step.

Ranks that go different ways would be noticed at the end of a job, or never, if the one that strayed
was replaced. So each says, with its gradients, what it held when the step began.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from planaria.errors import StateError
from planaria.torch.frozen import State, sections

MARK_BYTES = 6
ROW_WORDS = 512
BLOCK_ROWS = 256  # whose words are still in the cache for their second sum


class Replicas:
    """The marks of this rank's last state."""

    def __init__(self) -> None:
        self.said = b""
        self._names: list[str] = []

    def hold(self, state: State) -> None:
        """What freeze() returned, at the end of a step."""
        marks = {name: _mark(node, body) for name, node, body in sections(state)}
        self._names, self.said = list(marks), b"".join(marks.values())

    def compare(self, ranks: Sequence[bytes], step: int) -> None:
        """What all ranks have said of the states after this step."""
        for number, name in enumerate(self._names):
            of = slice(MARK_BYTES * number, MARK_BYTES * (number + 1))
            others = [rank for rank, said in enumerate(ranks) if said[of] != ranks[0][of]]
            if others:
                raise StateError(
                    f"{name} is not the same on all ranks after step {step}: it differs from rank "
                    f"0's on rank {', '.join(map(str, others))}. All ranks must compute the same "
                    "optimizer steps and keep the same values: skip a batch on all ranks or on "
                    "none, let no forward in training mode follow backward, and decide by job.step "
                    "or by what is equal everywhere, not by the rank or by its own loss"
                )


def _mark(node: bytes, body: State) -> bytes:
    """Of what the header says of an object, and of its tensors: a hash of sums, of which each word
    is in two, since hashing all of it would take longer than copying it does."""
    hashed = blake2b(node, digest_size=MARK_BYTES)
    words = body.view(np.uint64)
    whole = len(words) // ROW_WORDS * ROW_WORDS
    rows = words[:whole].reshape(-1, ROW_WORDS)
    for first in range(0, len(rows), BLOCK_ROWS):
        block = rows[first : first + BLOCK_ROWS]
        hashed.update(block.sum(axis=0))
        hashed.update(block.sum(axis=1))
    hashed.update(words[whole:].tobytes())
    return hashed.digest()
