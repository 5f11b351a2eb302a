"""Reading ahead: a thread prepares the next batches while this one is used.

Only the thread prepares, one step after the other, so that what it reads from needs no locks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

from planaria.errors import ArgumentError

T = TypeVar("T")
CLOSE_S = 60.0  # for the step that is being prepared when it is closed


class Ahead(Generic[T]):
    """Steps first to last, prepared in order, up to `depth` before they are asked for.

    Whoever asks for another step than the next one moves the thread there. What `prepare` raises
    for a step is raised to whoever asks for that step; asking again tries again. `close` it, or use
    it in a `with` statement.
    """

    def __init__(
        self, prepare: Callable[[int], T], first: int, last: int, *, depth: int = 2
    ) -> None:
        if depth < 1:
            raise ArgumentError(f"depth must be 1 or more, not {depth}")
        self._prepare = prepare
        self._first, self._last, self._depth = first, last, depth
        self._changed = threading.Condition()
        self._ready: dict[int, T] = {}
        self._failed: tuple[int, BaseException] | None = None  # the thread waits behind it
        self._wanted = first  # the step to be asked for next
        self._next = first  # the step to be prepared next
        self._moves = 0  # a step that was begun before the last move is not kept
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="reading ahead", daemon=True)
        self._thread.start()

    def get(self, step: int) -> T:
        """Waits until the step is prepared; from then on the next ones are."""
        with self._changed:
            if not self._first <= step <= self._last:
                raise ArgumentError(
                    f"there is no step {step} to read: they are {self._first} to {self._last}"
                )
            if step != self._wanted:
                self._move(step)
            self._changed.wait_for(lambda: self._closed or self._failed_at(step) or self._has(step))
            if self._closed:
                raise ArgumentError("this reader is closed; nothing more can be read from it")
            if self._failed is not None and self._failed_at(step):
                error = self._failed[1]
                self._move(step)
                raise error
            self._wanted = step + 1
            self._changed.notify_all()
            return self._ready.pop(step)

    def close(self) -> None:
        """Waits for the step that is being prepared, if any; whoever waits in `get` is told."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _has(self, step: int) -> bool:
        return step in self._ready

    def _failed_at(self, step: int) -> bool:
        return self._failed is not None and self._failed[0] == step

    def _move(self, step: int) -> None:
        """Drops what is not behind the step, and goes on with the first that is missing."""
        self._wanted = self._next = step
        self._failed = None
        self._moves += 1
        self._ready = {at: item for at, item in self._ready.items() if step <= at}
        while self._next in self._ready:
            self._next += 1
        self._ready = {at: item for at, item in self._ready.items() if at < self._next}
        self._changed.notify_all()

    def _may_go_on(self) -> bool:
        in_bounds = self._next <= self._last and self._next < self._wanted + self._depth
        return self._failed is None and in_bounds

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_go_on())
                if self._closed:
                    return
                step, moves = self._next, self._moves
            item: T | None = None
            failure: BaseException | None = None
            try:
                item = self._prepare(step)
            except BaseException as error:
                failure = error
            with self._changed:
                if self._closed or moves != self._moves:
                    continue
                if failure is not None:
                    self._failed = (step, failure)
                else:
                    self._ready[step] = item  # type: ignore[assignment]
                    self._next = step + 1
                self._changed.notify_all()
