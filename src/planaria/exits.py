"""How the commands end: their exit codes, and the sentence that goes with one."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_LOST = 3
EXIT_INTERRUPTED = 130


def leave(code: int, sentence: str) -> NoReturn:
    Console(stderr=True, highlight=False).print(
        f"error: {sentence}", style="red", soft_wrap=True, markup=False
    )
    raise typer.Exit(code)
