"""What a person sees of a run: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from planaria.cluster.reporting import Progress, counted
from planaria.config import Config
from planaria.wire.control import Rebuilding

RECENT_STEPS = 50  # over which the rate is taken
QUIET_S = 5.0  # without a terminal: the longest time between two lines


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
            self.live.update(Text(f"{self.title}: starting"))
            self.live.start(refresh=True)
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
        now = time.monotonic()
        if line:
            # Above the panel, where there is one: it goes, and the lines stay.
            self._print(now, line)
        if self.live:
            self.live.update(self._panel(progress))
        elif self._worth_a_line(progress, now):
            if progress.step_at:
                self.next_tenth = progress.step * 10 // self.config.steps + 1
            self._print(now, ", ".join(self._facts(progress)))

    def _print(self, now: float, line: str) -> None:
        self.said_at = now
        text = f"{now - self.started:7.2f} s  {line}"
        self.console.print(text, markup=False, soft_wrap=True)

    def _worth_a_line(self, progress: Progress, now: float) -> bool:
        """At every tenth of the steps, and when nothing was said for a while."""
        tenth = progress.step * 10 >= self.config.steps * self.next_tenth
        return bool(progress.step_at and tenth) or now - self.said_at > QUIET_S

    def _facts(self, progress: Progress) -> list[str]:
        """Short: on a line of 80 columns there is room for what comes first."""
        at_work = [fact for fact in (progress.waiting_for, progress.working) if fact]
        if not progress.step_at:
            return at_work or ["starting"]
        facts = [f"step {progress.step} of {self.config.steps}"]
        if not math.isnan(progress.loss):  # that of a script is its own business
            facts.append(f"loss {progress.loss:.4f}")
        if progress.auc is not None:
            facts.append(f"AUC {progress.auc:.3f}")
        rate = _rate(progress, self.config)
        if rate:
            left = (self.config.steps - progress.step) * self.config.batch
            facts += [f"{rate:,.0f}/s", f"{_duration(left / rate)} left"]
        return facts + at_work

    def _panel(self, progress: Progress) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            self.title,
            ProgressBar(self.config.steps, progress.step, width=20),
            _memory(self.config),
        )
        facts = Text(", ".join(self._facts(progress)), no_wrap=True, overflow="ellipsis")
        processes = Text(no_wrap=True, overflow="ellipsis")
        trainers, servers = len(progress.trainers), len(progress.servers)
        processes.append(f"{counted(trainers, 'trainer')}, {counted(servers, 'server')}")
        for place, told in sorted(progress.rebuilding.items()):
            processes.append(f" server:{place} rebuilds, {_how_far(told)}", "yellow")
        if progress.servers and not progress.rebuilding:
            processes.append(" all whole", "green")
        if progress.saved:  # not among the facts: when it counts is a matter of the clock
            processes.append(f", step {progress.saved} is saved")
        return Group(bar, facts, processes)


def _rate(progress: Progress, config: Config) -> float | None:
    """Samples per second, of late."""
    recent = progress.step_at[-RECENT_STEPS:]
    if len(recent) < 2 or recent[-1][1] == recent[0][1]:
        return None
    return (len(recent) - 1) * config.batch / (recent[-1][1] - recent[0][1])


def _how_far(told: Rebuilding) -> str:
    share = f"{100 * told.rows / max(told.rows + told.left, 1):.0f} % of its records"
    return share if told.left_s is None else f"{share}, {_duration(told.left_s)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _memory(config: Config) -> str:
    """Of records and parity on all servers."""
    arenas = config.arenas
    size = sum(arena.rows * arena.words * 4 for arena in arenas)
    return f"{size * (1 + config.layout.r / config.layout.k) / 1e6:,.0f} MB of records and parity"


def show_report(console: Console, report: dict[str, Any]) -> None:
    """The summary of a finished run."""
    table = Table.grid(padding=(0, 2))
    for name in ("digest", "steps", "samples"):
        table.add_row(name, str(report[name]))
    for name, label, form in (
        ("loss", "training loss, last steps", ".4f"),
        ("auc", f"AUC, {report['test_samples']} held-out samples", ".4f"),
        ("normalized_entropy", "normalised entropy, the same", ".4f"),
        ("samples_per_s", "samples/s", ",.0f"),
    ):
        value = report[name]
        if value is None and name != "samples_per_s":
            continue  # of a script, unless it told
        table.add_row(label, "-" if value is None else format(value, form))
    megabytes = (report["bytes_records"] / 1e6, report["bytes_parity"] / 1e6)
    tiers = report["tiers"]
    where = "two tiers" if tiers else "memory"
    table.add_row(where, f"{megabytes[0]:,.1f} MB records, {megabytes[1]:,.1f} MB parity")
    if tiers:
        found = 1 - tiers["missed"] / max(tiers["accesses"], 1)
        files = f"{tiers['disk_bytes'] / 1e6:,.1f} MB of files"
        table.add_row("", f"{files}, {found:.1%} of accesses found in memory")
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
        gap, rebuilt, rows = failure["gap_ms"], failure["rebuilt_ms"], failure["rows_rebuilt"]
        taken_over = rebuilt is not None and not rows
        console.print(
            f"{failure['who']}, step {failure['step']}, {failure['reason']}: next step after "
            f"{'-' if gap is None else f'{gap:.0f} ms'}, "
            f"{'records taken over by the others' if taken_over else f'{rows:,} records rebuilt'}"
            f"{'' if rebuilt is None else f' in {rebuilt:.0f} ms'}",
            markup=False,
            soft_wrap=True,
        )
    for checkpoint in report["checkpoints"]:
        if "failed" in checkpoint:
            console.print(
                f"no checkpoint of step {checkpoint['step']}: {checkpoint['failed']}",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )
