"""A storm: jobs with checkpoints under random faults to any of their processes.

    python tests/storm.py --jobs 50 --faults 20 --seed 1     (`make storm`)

Each job must end with the digest of an undisturbed run. Where it ends before, it must say so in one
sentence that is true and names the way back, and that way must lead to the digest as well. None may
hang, none may end in silence, and none may leave a process or a file behind.

One seed decides victims, kinds, lengths and delays. Time is real, so a seed gives the same storm,
but not the same instants.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cluster_jobs import left_behind, processes_of, wait_until
from storm_faults import SUPERVISOR, Fault, Undo, choose, draw_fault, strike, victims

MODEL = (
    "batch=512",
    "model.rows=2000",
    "model.tables=6",
    "model.dim=8",
    "model.bottom=[16]",
    "model.top=[16]",
    "data.test_samples=200",
    "trainers=1",
    "spares=1",
    "cluster.deadline_s=15",
    "cluster.hang_limit_s=8",
    "checkpoint.stall_s=30",
)
SHAPES = (
    ("strategy=erasure", "servers=4", "parity=1", "checkpoint.every_steps=20"),
    ("strategy=none", "servers=2", "checkpoint.every_s=0.25"),
    (
        "strategy=erasure",
        "servers=5",
        "parity=2",
        "cluster.transport=tcp",
        "checkpoint.every_s=0.25",
    ),
    ("strategy=checkpoint", "servers=3", "checkpoint.every_steps=20"),
)
POLICIES = ("full", "intermittent", "consecutive")
LIMIT_S = 300.0  # after the last fault is over
NO_SAVE_S = 20.0  # after which a fault does not wait for another checkpoint
GONE_S = 15.0  # how long the processes of a job may take to leave when the supervisor has ended
LOOK_S = 0.02
EXIT_NOTHING_SAVED = 2
KNOWN_EXITS = (1, 3, 130)

# What a job may say in the end, and what must have been done to it for that to be true: faults to
# as many processes of a role as are named here (R: one more than the parity bears; KEEPERS: those
# that keep the dense state beside the only trainer).
R, KEEPERS = -1, -2
DISK, DESCRIPTORS = "full disk", "no descriptors"
SENTENCES: tuple[tuple[str, dict[str, int], tuple[str, ...]], ...] = (
    (r"server:\d+.* was lost, and there is no parity", {"server": 1}, ()),
    (r"more than \d servers of a group were lost", {"server": R}, ()),
    (r"nobody is left who holds the dense network", {"trainer": 1, "server": KEEPERS}, ()),
    (r"server(:\d+)? failed \d times at step", {"server": 1}, ()),
    (r"trainer(:\d+)? failed \d times at step", {"trainer": 1}, ()),
    (r"the coordinator ended \d times in a row", {}, (DISK, DESCRIPTORS)),
    (r"in a row ended before they could take a place", {}, (DISK, DESCRIPTORS, "kill")),
    (r"the trained model was not saved", {}, ()),
    (r"its report could not be written", {SUPERVISOR: 1}, (DISK, DESCRIPTORS)),
    (r"has ended without a word", {SUPERVISOR: 1}, (DESCRIPTORS,)),
    (r"File too large", {}, (DISK,)),
    (r"Too many open files", {}, (DESCRIPTORS,)),
)


@dataclass
class Dealt:
    """A fault that has hit."""

    fault: Fault
    name: str
    at: float

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    def __str__(self) -> str:
        return f"{self.at:.1f} s {self.fault} of {self.name}"


@dataclass
class Outcome:
    """What became of a job. wrong: what must not be; "" if all is well."""

    faults: int = 0
    sentences: list[str] = field(default_factory=list)
    kills: int = 0  # of the supervisor
    hung: bool = False
    wrong: str = ""


class Storm:
    """One job under its faults, resumed until it is done."""

    def __init__(self, folder: Path, shape: Sequence[str], faults: Sequence[Fault]) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.saves = folder / "saves"
        self.shape = (*shape, f"checkpoint.path={self.saves}")
        self.faults = list(faults)
        self.outcome = Outcome()
        self.story: list[str] = []
        self._undo: list[tuple[float, Undo]] = []
        self._began = time.monotonic()
        self._quiet_since = self._began
        self._run = 0
        self._parity = 0
        for setting in shape:
            if setting.startswith("parity="):
                self._parity = int(setting.partition("=")[2])

    def run(self, digest: str) -> Outcome:
        """Until the job is done, or something is wrong. digest: of an undisturbed run."""
        outcome, resume = self.outcome, False
        while not outcome.wrong:
            dealt, code, killed = self._run_once(resume)
            if outcome.wrong:
                break
            if code == 0:
                self._judge_end(digest)
                break
            if killed:
                outcome.kills += 1
            elif code == EXIT_NOTHING_SAVED and resume and not self._saved():
                pass  # as its sentence says: there is nothing to resume from
            else:
                self._judge_sentence(code, dealt)
            resume = self._saved()
        return outcome

    # ------------------------------------------------------------------ one run

    def _run_once(self, resume: bool) -> tuple[list[Dealt], int, bool]:
        """What was dealt, the exit code, and whether the supervisor was killed by us."""
        self._run += 1
        options = ["--resume"] if resume else []
        dealt: list[Dealt] = []
        killed = False
        with self._start(options) as job:
            wait_until(lambda: bool(processes_of(self.home)) or job.poll() is not None, LIMIT_S)
            since, saved = time.monotonic(), self._newest()
            self._quiet_since = since
            while job.poll() is None:
                now = time.monotonic()
                self._undo_due(now)
                if self.faults and self._is_due(self.faults[0], now - since, saved):
                    hit = self._deal(self.faults.pop(0), job.pid)
                    dealt += hit
                    killed |= any(d.fault.kind == "kill" and d.name == SUPERVISOR for d in hit)
                    since, saved = now, self._newest()
                if self.faults or self._undo:
                    self._quiet_since = now
                elif now - self._quiet_since > LIMIT_S:
                    self.outcome.hung = True
                    self.outcome.wrong = f"hung: no end {LIMIT_S:.0f} s after the last fault"
                    self._say(self._stacks(job.pid))
                    job.kill()
                time.sleep(LOOK_S)
            assert job.stderr is not None
            (self.folder / f"err-{self._run}").write_bytes(job.stderr.read())
        self._say(f"run {self._run} {' '.join(options)} ended with code {job.returncode}")
        self._end_of_run()
        return dealt, job.returncode, killed

    def _is_due(self, fault: Fault, waited_s: float, saved: int) -> bool:
        """saved: the newest checkpoint at the fault before."""
        moved = self._newest() > saved or waited_s > NO_SAVE_S
        return waited_s >= fault.delay_s and (moved or not fault.after_save)

    def _start(self, options: Sequence[str]) -> subprocess.Popen[bytes]:
        sets = [f"--set={pair}" for pair in self.shape]
        report = ["--report", str(self.folder / "report.json")]
        command = [sys.executable, "-m", "planaria", "train", *sets, *options, *report]
        environment = {**os.environ, "PLANARIA_HOME": str(self.home), "COLUMNS": "200"}
        with (self.folder / f"out-{self._run}").open("wb") as out:
            # Not a file: a sentence must get out where a disk is full.
            return subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, env=environment)

    def _deal(self, fault: Fault, supervisor: int) -> list[Dealt]:
        victim = choose(fault, victims(self.home, supervisor))
        try:
            undo = strike(fault, victim, self.home)
        except OSError as error:
            self._say(f"{fault} missed {victim.name}: {error}")
            return []
        now = time.monotonic()
        self._undo.append((now + fault.seconds, undo))
        self.outcome.faults += 1
        dealt = Dealt(fault, victim.name, now - self._began)
        self._say(f"{fault} of {victim.name}, {victim.pid}")
        return [dealt]

    def _undo_due(self, now: float) -> None:
        for at, undo in list(self._undo):
            if now >= at:
                self._undo.remove((at, undo))
                undo()

    def _end_of_run(self) -> None:
        """The supervisor has ended: so must all others, whatever was done to them."""
        gone = wait_until(lambda: processes_of(self.home) == [], GONE_S)
        if not gone:
            names = [f"{one.name} ({one.pid})" for one in victims(self.home, 0)[:-1]]
            self.outcome.wrong = self.outcome.wrong or f"left processes behind: {names}"
        for _, undo in self._undo:
            undo()
        self._undo.clear()
        for pid in processes_of(self.home):
            os.kill(pid, signal.SIGKILL)

    # ------------------------------------------------------------------ judging

    def _saved(self) -> bool:
        return self._newest() > 0

    def _newest(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        found = self.saves.glob("step-*/MANIFEST.json")
        return max((int(path.parent.name[5:]) for path in found), default=0)

    def _judge_end(self, digest: str) -> None:
        found = json.loads((self.folder / "report.json").read_text())["digest"]
        if found != digest:
            self.outcome.wrong = f"silent: the digest is {found} instead of {digest}"
        elif left := left_behind(self.home):
            self.outcome.wrong = f"left files behind: {left}"

    def _judge_sentence(self, code: int, dealt: Sequence[Dealt]) -> None:
        said = (self.folder / f"err-{self._run}").read_text()
        self.outcome.sentences.append(said.strip())
        self._say(f"said: {said.strip()}")
        if code == -signal.SIGABRT and "ended without a word" in said:
            # A library has ended the supervisor, whose coordinator spoke in its place.
            said, code = said.splitlines(keepends=True)[-1], 1
        if code not in KNOWN_EXITS:
            self.outcome.wrong = f"silent: exit code {code} and {said!r}"
        elif not said.startswith("error: ") or said.count("\n") != 1:
            self.outcome.wrong = f"silent: {said!r} is not one sentence"
        elif self._saved() and "--resume" not in said:
            self.outcome.wrong = f"the way back is not named: {said}"
        elif not self._is_true(said, dealt):
            self.outcome.wrong = f"what was done does not explain: {said}"

    def _is_true(self, said: str, dealt: Sequence[Dealt]) -> bool:
        if not dealt:
            return False
        for pattern, who, kinds in SENTENCES:
            if re.search(pattern, said):
                fewest = {R: self._parity + 1, KEEPERS: self._parity}
                enough = all(
                    len({one.name for one in dealt if one.role == role}) >= fewest.get(least, least)
                    for role, least in who.items()
                )
                return enough and (not kinds or any(one.fault.kind in kinds for one in dealt))
        return False

    # ------------------------------------------------------------------ the story

    def _say(self, line: str) -> None:
        self.story.append(f"{time.monotonic() - self._began:7.2f} s  {line}")

    def _stacks(self, supervisor: int) -> str:
        """Who is there, in which state."""
        found = []
        for one in victims(self.home, supervisor):
            try:
                state = Path(f"/proc/{one.pid}/wchan").read_text()
            except OSError:
                state = "gone"
            found.append(f"{one.name} {state}")
        return "still there: " + ", ".join(found)

    def tell_everything(self) -> str:
        """For whoever looks for the cause."""
        texts = ["\n".join(self.story)]
        logs = [*sorted(self.folder.glob("out-*")), *sorted(self.folder.glob("err-*"))]
        for path in [*logs, *sorted(self.home.glob("jobs/*/logs/*.log"))]:
            text = path.read_text(errors="replace").rstrip()
            if text:
                texts.append(f"--- {path.relative_to(self.folder)}\n{text}")
        return "\n".join(texts)


@cache
def undisturbed(steps: int) -> str:
    """The digest in quiet weather. It is one for all shapes: neither strategies nor servers
    change a bit.
    """
    with tempfile.TemporaryDirectory(prefix="planaria-storm-", dir="/tmp") as folder:
        quiet = Storm(Path(folder), (*MODEL, *SHAPES[1], f"steps={steps}"), [])
        quiet._run_once(resume=False)
        return str(json.loads((quiet.folder / "report.json").read_text())["digest"])


@dataclass(frozen=True)
class Campaign:
    seed: int
    faults: int
    steps: int
    keep: bool = False  # the folders of jobs that went wrong
    story: bool = False  # whether all that was done is told of every job

    def shape(self, number: int) -> tuple[str, ...]:
        policy = POLICIES[number // len(SHAPES) % len(POLICIES)]
        changing = (f"steps={self.steps}", f"checkpoint.policy={policy}")
        return (*MODEL, *SHAPES[number % len(SHAPES)], *changing)

    def run(self, number: int) -> Outcome:
        """One job; prints a line, and everything if it went wrong."""
        draw = random.Random(f"{self.seed} {number}")
        faults = [draw_fault(draw) for _ in range(self.faults)]
        shape = self.shape(number)
        digest = undisturbed(self.steps)
        folder = Path(tempfile.mkdtemp(prefix="planaria-storm-", dir="/tmp"))
        storm = Storm(folder, shape, faults)
        began = time.monotonic()
        outcome = storm.run(digest)
        strategy = " ".join(SHAPES[number % len(SHAPES)])
        print(
            f"job {number} ({strategy}): {outcome.faults} faults, {outcome.kills} of them kills of "
            f"the supervisor, {len(outcome.sentences)} sentences, "
            f"{time.monotonic() - began:.0f} s: {outcome.wrong or 'the undisturbed digest'}",
            flush=True,
        )
        for sentence in outcome.sentences:
            print(f"    {sentence}", flush=True)
        if self.story and not outcome.wrong:
            print("\n".join(storm.story), flush=True)
        if outcome.wrong:
            print(f"seed {self.seed}, job {number}:\n{storm.tell_everything()}", flush=True)
        if not (outcome.wrong and self.keep):
            shutil.rmtree(folder)
        return outcome


def closing_line(outcomes: Sequence[Outcome]) -> str:
    well = [one for one in outcomes if not one.wrong]
    plain = sum(not one.sentences for one in well)
    hung = sum(one.hung for one in outcomes)
    return (
        f"{len(outcomes)} jobs, {sum(one.faults for one in outcomes)} faults: "
        f"{plain} ended with the undisturbed digest, "
        f"{len(well) - plain} with a sentence whose way back led there, "
        f"{hung} hung, {sum(one.wrong.startswith('silent') for one in outcomes)} silent, "
        f"{sum(bool(one.wrong) for one in outcomes)} wrong in all"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--faults", type=int, default=20, help="per job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--keep", action="store_true", help="folders of jobs that went wrong")
    parser.add_argument("--story", action="store_true", help="tell of every job what was done")
    given = parser.parse_args()
    campaign = Campaign(given.seed, given.faults, given.steps, given.keep, given.story)
    outcomes = [campaign.run(given.first + number) for number in range(given.jobs)]
    print(closing_line(outcomes), flush=True)
    return int(any(one.wrong for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
