"""The rows of a trainer's lookups as they arrive: at once or in two parts, plain or in frames."""

from __future__ import annotations

from planaria.errors import WireError
from planaria.kernels.types import Floats
from planaria.layout import Layout
from planaria.trainer.early import EarlyParts, Part
from planaria.trainer.job import TrainerJob
from planaria.trainer.rerouting import Route
from planaria.wire.coding import Rows
from planaria.wire.messages import Answer, Early


class Arrivals:
    """By lookup and place, in this view."""

    def __init__(self, job: TrainerJob) -> None:
        self.job = job
        self.answers: dict[Part, dict[int, list[Floats]]] = {}  # per place and arena
        self.early = EarlyParts()
        self.errors: list[str] = []  # frames that were refused, for the log

    def clear(self) -> None:
        self.answers.clear()
        self.early.clear()

    def take_out(self, part: Part) -> dict[int, list[Floats]]:
        """What has come, once all of it has."""
        self.early.forget(part)
        return self.answers.pop(part)

    def of(self, part: Part) -> dict[int, list[Floats]]:
        return self.answers.get(part, {})

    def has(self, part: Part, place: int) -> bool:
        return place in self.answers.get(part, ())

    def take_early(self, early: Early, route: Route, layout: Layout) -> None:
        """layout: that of the route's places."""
        part, place = (early.step, early.part), early.place
        plain = None if self.has(part, place) else self._plain(early, route, layout)
        if plain is not None:
            self.early.put(part, place, plain, self._shapes(route, place))

    def take(self, answer: Answer, route: Route, layout: Layout) -> bool | None:
        """Whether all rows of that place are there now; None where it is no answer to that, and as
        if it had not come: it will be asked for again.
        """
        part, place = (answer.step, answer.part), answer.place
        if answer.frames and self.has(part, place):
            return True
        plain, wanted = self._plain(answer, route, layout), self._shapes(route, place)
        if plain is None:
            return None
        if plain.which:
            whole = self.early.complete(part, place, plain, wanted)
            if whole is None:
                return self.has(part, place)
        elif [weights.shape for weights in plain.weights] == wanted:
            whole = plain.weights
        else:
            return None
        self.answers.setdefault(part, {})[place] = whole
        return True

    def _plain(self, message: Rows, route: Route, layout: Layout) -> Rows | None:
        try:
            return self.job.coding.unpacked(message, layout, route.rows[message.place])
        except WireError as error:
            self.errors.append(f"{type(message).__name__} of place {message.place}: {error}")
            return None

    def _shapes(self, route: Route, place: int) -> list[tuple[int, int]]:
        """Of the rows that were asked for, per arena."""
        return [(len(i), dim) for i, dim in zip(route.rows[place], self.job.dims, strict=True)]
