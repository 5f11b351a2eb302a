"""A process's line to its supervisor and to the coordinator, in a thread of its own.

The heart beats here, so that a long computation is not taken for death; each beat carries for how
long the main loop has not turned, so that a hung one is. What is told goes out at once, from any
thread, and again until it is heard.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from planaria.cluster.transport import Connection, Transport
from planaria.coordinator.watch import Pulse
from planaria.errors import WireError
from planaria.wire.control import Control, Told, Working
from planaria.wire.messages import NO_VIEW, Heartbeat
from planaria.wire.telling import Teller

FLUSH_S = 0.005  # between two looks whether there is room for more
WORKING_S = 0.5  # between two words on a long piece of work


class Line:
    """Use `tell` from any thread; `turn` and `heard` are the main loop's."""

    def __init__(self, transport: Transport, supervisor: str, beat_s: float) -> None:
        """supervisor: where it listens."""
        self.coordinator = ""  # where it listens, once that is known
        self._transport = transport
        self._supervisor = supervisor
        self._beat_s = beat_s
        self._teller = Teller()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Control | Heartbeat | None] = queue.SimpleQueue()
        self._pulse = Pulse(beat_s, time.monotonic())
        self._worked = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def tell(self, what: Told) -> None:
        """Until it is heard."""
        with self._lock:
            message = self._teller.tell(what, time.monotonic())
        self._queue.put(message)

    def say(self, message: Control | Heartbeat) -> None:
        """Once: whoever does not hear it asks again."""
        self._queue.put(message)

    def heard(self, number: int) -> None:
        with self._lock:
            self._teller.heard(number)

    @property
    def unheard(self) -> int:
        return self._teller.unheard

    def turn(self) -> None:
        """The main loop turns."""
        self._pulse.turn(time.monotonic())

    def working(self, what: str, done: int, of: int) -> None:
        """The main loop does not turn for a while, but something moves: tell of it now and then."""
        self.turn()
        now = time.monotonic()
        if now - self._worked >= WORKING_S or done >= of:
            self._worked = now
            self.tell(Working(what=what, done=done, of=of))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(1.0)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        to_supervisor = self._transport.connect(self._supervisor)
        beats: tuple[str, Connection | None] = ("", None)
        next_beat = time.monotonic()
        while True:
            waits = to_supervisor.flush()  # more than the kernel takes at once
            until_s = FLUSH_S if waits else next_beat - time.monotonic()
            with contextlib.suppress(queue.Empty):
                message = self._queue.get(timeout=max(until_s, 0.001))
                if message is None:
                    break
                self._send(to_supervisor, message)
            now = time.monotonic()
            if now < next_beat:
                continue
            next_beat = now + self._beat_s
            if not waits:  # what was not sent cannot have been heard
                with self._lock:
                    again = self._teller.due(now)
                for tell in again:
                    self._send(to_supervisor, tell)
            beats = self._beat(beats, now)
        if beats[1] is not None:
            beats[1].close(linger_s=0)
        to_supervisor.close()

    def _beat(
        self, beats: tuple[str, Connection | None], now: float
    ) -> tuple[str, Connection | None]:
        (address, connection), wanted = beats, self.coordinator
        if wanted != address:
            if connection is not None:
                connection.close(linger_s=0)
            address, connection = "", None
            with contextlib.suppress(OSError):  # no descriptor left: at the next beat, then
                connection = self._transport.connect(wanted) if wanted else None
                address = wanted
        if connection is not None:
            beat = Heartbeat(view=NO_VIEW, age_ms=self._pulse.beat(now))
            self._send(connection, beat)
        return address, connection

    def _send(self, connection: Connection, message: Control | Heartbeat) -> None:
        with contextlib.suppress(WireError):
            connection.send(self._transport.encode(message))
