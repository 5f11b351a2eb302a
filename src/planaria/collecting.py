"""The garbage collector of a process that starts.

Modules and what they make are never garbage. Looking for it among them takes a fifth of the time
that importing PyTorch does, and later, now and then, longer than a step does.
"""

from __future__ import annotations

import gc

USUAL = gc.get_threshold()
IMPORTING = (50_000, 20, 20)


def collect_rarely() -> None:
    """Much is imported now."""
    gc.set_threshold(*IMPORTING)


def keep_what_is_there() -> None:
    """All of that stays, and is not looked at again. Processes that are forked share its memory.

    Nothing happens where nobody has said `collect_rarely`, or a script has set thresholds itself.
    """
    if gc.get_threshold() == IMPORTING:
        gc.freeze()
        gc.set_threshold(*USUAL)
