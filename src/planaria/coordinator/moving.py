"""Servers that come and go: what is wanted, and what the next view makes of the layout.

A resize takes two views. The first names the newcomers and the resize: from then on memberships
that are to move have mirrors (planaria.layout.resizing), and all else is as it was. When all
servers that stay have said that they and their mirrors are whole, the second makes mirrors what
they mirror, and retires who has nothing left. A view change that comes in between, because somebody
died, leaves the resize as it is: whoever replaces a lost server fills its mirrors anew.

Where survivors rebuild, the view that replaces a lost server also begins a resize without its
place. The replacement answers for it meanwhile, and decodes only what steps need; all others
mirror its memberships, so each takes in a part of what one alone would have to. When that is over,
the job grows back, by a resize like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from planaria.errors import LayoutError
from planaria.layout import Layout
from planaria.layout.resizing import Resize, check_resize, resized
from planaria.wire.messages import Install, Member, Promise, Scale, Scaled

FORGOTTEN_S = 5.0  # whoever waits for something asks several times as often
ASKED_SINCE = "somebody has asked for something else since"


class Moves(NamedTuple):
    """What a view makes of the layout."""

    servers: list[Member]  # by place; behind them, those that come
    retire: Sequence[Member]
    resizes: list[Resize]
    moving: Resize | None


class Moving:
    """The resizes of a job, as its coordinator sees them."""

    def __init__(self, *, by_survivors: bool = False) -> None:
        """by_survivors: these rebuild what was lost."""
        self.wanted: Resize | None = None  # and not begun
        self.domains: Mapping[Member, str] | None = None  # of servers and spares, where they matter
        self.fixed = ""  # why the number of servers cannot change, if it cannot
        self._by_survivors = by_survivors
        self._asked_at = 0.0  # for what is wanted
        self._number = 0  # of the request for it
        self._refused: tuple[Resize, str] | None = None  # when it was to begin, and why
        self._hopeless: Resize | None = None  # to grow back: not with these domains

    def on_scale(
        self, scale: Scale, install: Install, layout: Layout, partial: bool, now: float = 0.0
    ) -> Scaled:
        """The answer to whoever wants it, which asks until it is done."""
        state, why = "moving", ""
        if scale.number > self._number:
            self.wanted = self._refused = None
            self._number = scale.number
        under_way = install.moving or self.wanted
        if install.moving is not None and (install.moving.lost or _lost(install)):
            pass  # nobody has asked for that, but it comes first
        elif under_way is not None and _is_asked_for(under_way, scale, install):
            self._asked_at = now
        elif install.moving is None and _is_done(scale, install):
            state = "done"
        elif install.moving is None and scale.number < self._number:
            state, why = "refused", ASKED_SINCE
        elif under_way is not None:
            state = "refused"
            why = f"the job is changing to {under_way.servers} servers; wait for that"
        else:
            try:
                if self.fixed:
                    raise LayoutError(self.fixed)
                wanted = _resize(scale, install, layout, partial=partial)
                self._refuse_again(wanted)
                if not wanted.come and (known := self._begins(wanted, install.servers, [])):
                    resized(layout, known)
                self.wanted = wanted
                self._asked_at = now
            except LayoutError as error:
                state, why = "refused", str(error)
        return Scaled(view=install.view, servers=len(install.servers), state=state, why=why)

    def _refuse_again(self, wanted: Resize) -> None:
        """Who asks for it learns why it did not begin; another time it may."""
        refused, self._refused = self._refused, None
        if refused is not None and refused[0] == wanted:
            raise LayoutError(refused[1])

    def forget(self, now: float) -> None:
        """What nobody asks for any more, and has not begun."""
        if now - self._asked_at > FORGOTTEN_S:
            self.wanted = None

    def is_due(self, install: Install, spares: Sequence[Member]) -> bool:
        """Whether a view is wanted, given that everybody has all that it holds or mirrors."""
        wanted = self._next_wanted(install)
        if install.moving is not None or wanted is None:
            return install.moving is not None
        begins = self._begins(wanted, install.servers, spares)
        return begins is not None and begins != self._hopeless

    def comes(self, install: Install) -> int:
        """How many spares the next view needs for that."""
        wanted = self._next_wanted(install)
        return wanted.come if wanted is not None and install.moving is None else 0

    def _next_wanted(self, install: Install) -> Resize | None:
        """What was asked for; else as many servers as there were before some were lost."""
        if self.wanted is not None or not _lost(install):
            return self.wanted
        return Resize(tuple(range(len(install.servers))), _lost(install))

    def progress(self, install: Install, spares: int, there: Collection[Member]) -> str:
        """How far a resize is. spares: that could come; there: who has all that it mirrors."""
        if install.moving is None:
            return waiting_for(self.comes(install) - spares)
        stay = [install.servers[place] for place in install.moving.places(len(install.servers))]
        return f"{len({*stay} & {*there})} of {len(stay)} servers have what they are to hold"

    def next(
        self,
        install: Install,
        servers: list[Member],
        promises: Mapping[Member, Promise],
        spares: Sequence[Member],
        layout: Layout,
        keepers: Sequence[Member] = (),
    ) -> Moves:
        """install: of the last view; servers: those of its places, now; spares: that are left;
        keepers: of the dense state, those to come included.
        """
        moving = install.moving
        if moving is not None and _all_is_there(install, servers, promises, keepers):
            stay = [servers[place] for place in moving.places(len(servers))]
            retire = [member for member in servers if member not in stay]
            return Moves(stay, retire, [*install.resizes, moving], None)
        if moving is None and (begins := self._without_lost(servers, promises, layout)):
            self.wanted = None  # it names places; who asked for it asks again
            return Moves(servers, [], install.resizes, begins)
        if moving is None and (begins := self._next_to_begin(install, servers, spares, layout)):
            come = [*spares[: begins.come]]
            return Moves(servers + come, [], install.resizes, begins)
        return Moves(servers, [], install.resizes, moving)

    def _without_lost(
        self, servers: Sequence[Member], promises: Mapping[Member, Promise], layout: Layout
    ) -> Resize | None:
        """Survivors take over what the others held, if they are enough."""
        whole = [
            place
            for place, member in enumerate(servers)
            if member in promises and promises[member].whole
        ]
        if not self._by_survivors or len(whole) == len(servers):
            return None
        taken_over = Resize(tuple(whole), 0, lost=len(servers) - len(whole))
        begins = self._begins(taken_over, servers, [])
        try:
            if begins is not None:
                resized(layout, begins)
        except LayoutError:
            return None  # a replacement rebuilds it
        return begins

    def _next_to_begin(
        self, install: Install, servers: Sequence[Member], spares: Sequence[Member], layout: Layout
    ) -> Resize | None:
        wanted = self._next_wanted(install)
        begins = None if wanted is None else self._begins(wanted, servers, spares)
        if wanted is None or begins is None:
            return None
        try:
            resized(layout, begins)  # their domains may not allow it
        except LayoutError as error:
            if wanted == self.wanted:
                self._refused = (wanted, str(error))
            else:
                self._hopeless = begins
            return None
        finally:
            self.wanted = None
        return begins

    def _begins(
        self, wanted: Resize, servers: Sequence[Member], spares: Sequence[Member]
    ) -> Resize | None:
        """With the domains of those that stay and come; None: these are not there or known yet."""
        come = [*spares[: wanted.come]]
        if len(come) < wanted.come:
            return None
        if self.domains is None:
            return wanted
        members = [*(servers[place] for place in wanted.stay), *come]
        if not self.domains.keys() >= {*members}:
            return None
        return wanted._replace(domains=tuple(self.domains[member] for member in members))


def waiting_for(lacking: int) -> str:
    return f"waiting for {lacking} more to start" if lacking > 0 else ""


def _is_done(scale: Scale, install: Install) -> bool:
    stay = {*scale.without}.isdisjoint(install.servers)
    return scale.servers in (None, len(install.servers)) and stay and not _lost(install)


def _is_asked_for(resize: Resize, scale: Scale, install: Install) -> bool:
    stays = {install.servers[place] for place in resize.stay}
    return scale.servers in (None, resize.servers) and stays.isdisjoint(scale.without)


def _resize(scale: Scale, install: Install, layout: Layout, *, partial: bool) -> Resize:
    """Who is not wanted leaves, and then who came last; the servers of the first places, which may
    keep the dense state, stay if they can.
    """
    if partial:
        raise LayoutError(
            "with strategy: cpr the number of servers is fixed; save, and --resume with another."
        )
    stay = [p for p, member in enumerate(install.servers) if member not in scale.without]
    servers = len(stay) + _lost(install) if scale.servers is None else scale.servers
    resize = Resize(tuple(stay[:servers]), max(servers - len(stay), 0))
    check_resize(layout, resize)
    return resize


def _all_is_there(
    install: Install,
    servers: Sequence[Member],
    promises: Mapping[Member, Promise],
    keepers: Sequence[Member],
) -> bool:
    """Who stays has all that it is to hold, and knows what that is; nobody was just replaced."""
    assert install.moving is not None
    stay = [servers[place] for place in install.moving.places(len(servers))]
    return all(
        member in promises
        and promises[member].moves == install.moves
        and promises[member].whole
        and promises[member].mirrored
        and (promises[member].dense or member not in keepers)
        for member in stay
    )


def _lost(install: Install) -> int:
    """How many servers there are fewer, since some were lost and not made up for."""
    return sum(resize.lost for resize in takewhile(_has_lost, reversed(install.resizes)))


def _has_lost(resize: Resize) -> bool:
    return resize.lost > 0
