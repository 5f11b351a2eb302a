"""How the commands speak and end: where they print, their exit codes, and the sentence with one."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_LOST = 3
EXIT_INTERRUPTED = 130


class Output(Console):
    """Standard output, or standard error. A job never ends because nobody can read its lines.

    `problem` says why some could not be written, but for a reader who has left: that is no problem.
    """

    problem: OSError | None = None

    def on_broken_pipe(self) -> None:
        self.quiet = True  # where Rich ends the process

    def _check_buffer(self) -> None:
        # All that is printed passes here: lines, and panels from threads of their own.
        try:
            super()._check_buffer()
        except OSError as error:  # no room on the disk, or a terminal that is gone
            self.problem = error


def leave(code: int, sentence: str) -> NoReturn:
    Output(stderr=True, highlight=False).print(
        f"error: {sentence}", style="red", soft_wrap=True, markup=False
    )
    raise typer.Exit(code)


def leave_if_unprinted(output: Output) -> None:
    """For a command whose result is what it prints."""
    if output.problem:
        leave(EXIT_FAILED, f"some lines could not be printed: {output.problem}")
