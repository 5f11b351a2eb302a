"""What a user keeps: the state of any objects as opaque bytes, and random numbers by step.

Whatever has state_dict and load_state_dict can be kept: modules, optimizers, schedulers, averages,
metrics. Nothing here looks inside beyond the kinds of values that there are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from planaria import kernels
from planaria.errors import StateError
from planaria.server.digest import Digest
from planaria.torch.frozen import State, fingerprint, pack, unpack
from planaria.trainer.dense import DENSE_TABLE, DIGEST_WORDS

RECORD_BYTES = 4 * DIGEST_WORDS
SEEDED_BY = struct.Struct("<QQQ")


class Keeper:
    """Objects by name; their order is part of the state."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        for name, one in objects.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(one, method, None)):
                    raise StateError(
                        f"{name} is a {type(one).__name__} without {method}(); keep objects that "
                        "have state_dict() and load_state_dict(), as modules and optimizers do"
                    )
        self._objects: dict[str, Any] = dict(objects)
        self.freeze()  # so that what cannot be kept is refused now, not after the first step
        self._fingerprint = fingerprint(self._states())

    def fingerprint(self) -> str:
        """Of names, keys, dtypes and shapes when this was made; equal on ranks that keep equally.

        Only then, because optimizers get their state with their first step.
        """
        return self._fingerprint

    def freeze(self) -> State:
        """All states of now, in fresh memory that the caller owns.

        The structure is read anew each time: what a state_dict holds may change with any step.
        """
        return pack(self._states())

    def thaw(self, state: State) -> None:
        """Gives the objects the states that were frozen; if that fails, they have their old ones.

        The array is not kept, and may be changed afterwards.
        """
        states = unpack(state)
        if not isinstance(states, dict) or list(states) != list(self._objects):
            there = ", ".join(map(str, states)) if isinstance(states, dict) else "something else"
            raise StateError(
                f"a state of {there or 'nothing'} does not fit "
                f"{', '.join(self._objects) or 'nothing'}; keep the same objects everywhere"
            )
        before = self.freeze()
        try:
            self._load(states)
            self._check_equal(state)
        except StateError:
            with suppress(StateError):
                self._load(unpack(before))
            raise

    def _states(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._objects.items()}

    def _load(self, states: dict[str, Any]) -> None:
        for name, one in self._objects.items():
            try:
                one.load_state_dict(states[name])
            # It is the user's code, or torch's, which raises what it likes.
            except Exception as error:
                raise StateError(
                    f"{name} cannot load the state that was kept: {error}; "
                    "make the objects alike everywhere before they are kept"
                ) from error

    def _check_equal(self, state: State) -> None:
        """Or training would go on from another state, and nobody would know."""
        if np.array_equal(self.freeze(), state):
            return
        wanted = unpack(state)
        for name, one in self._objects.items():
            if not np.array_equal(pack(one.state_dict()), pack(wanted[name])):
                raise StateError(
                    f"{name}, a {type(one).__name__}, has another state after load_state_dict() "
                    "than the one it was given; its types and shapes must be those of the state, "
                    "and load_state_dict() must restore all of it"
                )
        raise StateError("a kept state was not written by freeze(); pass what freeze() returned")


def digest(state: State) -> Digest:
    """Of the bytes; add it to the digests of the servers, as the dense network's."""
    whole = len(state) // RECORD_BYTES * RECORD_BYTES
    tail = np.zeros(RECORD_BYTES, np.uint8)
    tail[: len(state) - whole] = state[whole:]
    total, first = Digest(), DENSE_TABLE << 40
    for part in (state[:whole], tail):
        words = np.ascontiguousarray(part).view(np.uint32).reshape(-1, DIGEST_WORDS)
        # A frame of a message may begin at any byte.
        records = np.require(words, requirements=("C", "A"))
        keys = np.arange(first, first + len(records), dtype=np.uint64)
        total += Digest(*kernels.digest(records, keys))
        first += len(records)
    return total


def seed_torch(seed: int, step: int, rank: int) -> None:
    """Sets torch's random state, so that dropout is the same for whoever computes this again.

    Without torch.manual_seed, which looks at every kind of device that torch knows.
    """
    mixed = blake2b(SEEDED_BY.pack(seed % 2**64, step, rank), digest_size=8).digest()
    number = int.from_bytes(mixed, "little")
    torch.default_generator.manual_seed(number)
    for seed_devices in _seeding_devices():
        seed_devices(number)


@cache
def _seeding_devices() -> list[Callable[[int], None]]:
    """For each kind of device that trainer.device may name, if there is one. Asked once: a step
    may take less time than the question.
    """
    kinds: list[tuple[Any, Callable[[int], None]]] = [
        (torch.cuda, torch.cuda.manual_seed_all),
        (torch.backends.mps, torch.mps.manual_seed),
        (torch.xpu, torch.xpu.manual_seed_all),
    ]
    return [seed_devices for kind, seed_devices in kinds if kind.is_available()]
