"""What a person sees of a run: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from planaria.cluster.run import Progress
from planaria.config import Config

RECENT_STEPS = 50  # over which the rate is taken
QUIET_S = 10.0  # without a terminal: the longest time between two lines


class Display:
    """Observes one run. Use it as a context manager around the run."""

    def __init__(self, console: Console, title: str, config: Config) -> None:
        self.console = console
        self.title = title
        self.config = config
        self.next_tenth = 1
        self.started = self.said_at = time.monotonic()
        self.live = (
            Live(console=console, refresh_per_second=8, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live:
            self.live.stop()

    def __call__(self, line: str, progress: Progress) -> None:
        if line:
            # Above the panel, where there is one: it goes, and the lines stay.
            text = f"{time.monotonic() - self.started:7.2f} s  {line}"
            self.console.print(text, markup=False, soft_wrap=True)
        if self.live:
            self.live.update(self._panel(progress))
        elif progress.step_at and self._worth_a_line(progress):
            now = time.monotonic()
            self.said_at = now
            self.next_tenth = progress.step * 10 // self.config.steps + 1
            rate = _rate(progress, self.config)
            self.console.print(
                f"{now - self.started:7.2f} s  step {progress.step} of {self.config.steps}, "
                f"{_quality(progress)}{', ' if rate else ''}{rate}",
                soft_wrap=True,
            )

    def _worth_a_line(self, progress: Progress) -> bool:
        """At every tenth of the steps, and when nothing was said for a while."""
        tenth = progress.step * 10 >= self.config.steps * self.next_tenth
        return tenth or time.monotonic() - self.said_at > QUIET_S

    def _panel(self, progress: Progress) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            self.title,
            ProgressBar(self.config.steps, progress.step, width=32),
            f"{progress.step}/{self.config.steps}",
            _quality(progress),
            _rate(progress, self.config),
        )
        servers = Text()
        for place in range(len(progress.servers)):
            rows = progress.rebuilding.get(place)
            state = "whole" if rows is None else f"rebuilding, {rows} rows"
            servers.append(f" server:{place} ", "bold")
            servers.append(state + " ", "green" if rows is None else "yellow")
        return Group(bar, servers)


def _quality(progress: Progress) -> str:
    found = [f"training loss {progress.loss:.4f}"]
    if progress.auc is not None:
        found.append(f"AUC {progress.auc:.3f}")
    if progress.normalized_entropy is not None:
        found.append(f"entropy {progress.normalized_entropy:.3f}")
    return ", ".join(found)


def _rate(progress: Progress, config: Config) -> str:
    recent = progress.step_at[-RECENT_STEPS:]
    if len(recent) < 2 or recent[-1][1] == recent[0][1]:
        return ""
    rate = (len(recent) - 1) * config.batch / (recent[-1][1] - recent[0][1])
    return f"{rate:,.0f} samples/s"


def show_report(console: Console, report: dict[str, Any]) -> None:
    """The summary of a finished run."""
    table = Table.grid(padding=(0, 2))
    for name in ("digest", "steps", "samples"):
        table.add_row(name, str(report[name]))
    for name, label, form in (
        ("loss", "training loss, last 50 steps", ".4f"),
        ("auc", f"AUC, {report['test_samples']} held-out samples", ".4f"),
        ("normalized_entropy", "normalised entropy, the same", ".4f"),
        ("samples_per_s", "samples/s", ",.0f"),
    ):
        value = report[name]
        table.add_row(label, "-" if value is None else format(value, form))
    megabytes = (report["bytes_records"] / 1e6, report["bytes_parity"] / 1e6)
    table.add_row("memory", f"{megabytes[0]:,.1f} MB records, {megabytes[1]:,.1f} MB parity")
    if (scrubbed := report["scrubbed"])["rounds"]:
        table.add_row(
            "scrubbed", f"{scrubbed['records']:,} parity records, {scrubbed['wrong']} wrong"
        )
    if report["reloads"]:
        table.add_row(
            "lost samples (PLS)", f"{report['pls']:.4f}, by updates {report['pls_updates']:.4f}"
        )
    console.print(table)
    for failure in report["failures"]:
        gap, rebuilt = failure["gap_ms"], failure["rebuilt_ms"]
        console.print(
            f"{failure['who']}, step {failure['step']}: next step after "
            f"{'-' if gap is None else f'{gap:.0f} ms'}, "
            f"{failure['rows_rebuilt']:,} records rebuilt"
            f"{'' if rebuilt is None else f' in {rebuilt:.0f} ms'}"
        )
    for checkpoint in report["checkpoints"]:
        if "failed" in checkpoint:
            console.print(
                f"no checkpoint of step {checkpoint['step']}: {checkpoint['failed']}",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )
