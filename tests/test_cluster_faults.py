"""Frozen, flooded with garbage, struck too hard, interrupted: a job ends well, or says why not."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from cluster_jobs import (
    GONE_S,
    TINY,
    BeatenRun,
    Blow,
    children_of,
    leaving_nothing,
    left_behind,
    processes_of,
    tiny,
    undisturbed,
    wait_until,
)

from planaria.cluster import nursery
from planaria.cluster.asking import running_jobs, scrub
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import Exited, JobEvent, Watcher
from planaria.cluster.files import Beginning, JobFiles
from planaria.cluster.launcher import LocalLauncher
from planaria.cluster.run import JobRun
from planaria.cluster.transport import open_transport
from planaria.config import ClusterConfig
from planaria.control.children import EXIT_ORPHAN
from planaria.errors import ClusterError, ConfigError, DataError, LossError
from planaria.schedule import Freeze
from planaria.wire.codec import Envelope
from planaria.wire.control import (
    HeldOut,
    Listening,
    Ready,
    ServerHolds,
    Silent,
    StepDone,
    WantMore,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    """Where the jobs of a test have their folders; it must be empty in the end."""
    with leaving_nothing() as folder:
        yield folder


# ---------------------------------------------------------------------------- the nursery


def test_processes_are_children_of_the_supervisor_with_and_without_nurseries() -> None:
    struck: list[str] = []
    parents: dict[str, int] = {}

    def strike(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, Ready):
            pid = processes.launcher.pid(event.member)
            parents[event.member] = int(Path(f"/proc/{pid}/stat").read_text().split()[3])
        if isinstance(event.what, StepDone) and event.what.step >= 20 and not struck:
            assert isinstance(processes.launcher, LocalLauncher)
            for one in processes.launcher._nurseries.values():
                os.kill(one.pid, signal.SIGKILL)
            struck.extend([run.progress.servers[0], run.progress.trainers[0]])
            for member in struck:
                processes.signal(member)

    run = BeatenRun(tiny("trainers=2", "servers=2", "parity=1"), on_event=strike)
    assert run.run()["digest"] == undisturbed("trainers=2")
    assert sorted(run.killed) == sorted(struck)
    started = [f"{role}-{number}" for role in ("server", "trainer") for number in range(3)]
    assert set(parents) >= set(started)
    assert set(parents.values()) == {os.getpid()}


@pytest.mark.parametrize("nurseries", [True, False])
def test_a_coordinator_that_is_replaced_is_forked_where_there_is_a_nursery(nurseries: bool) -> None:
    """It took a core for half a second, several steps, to import what it needs."""
    next_one: list[tuple[str, int]] = []

    def strike(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, Listening) and event.what.role == "coordinator":
            process = Path(f"/proc/{processes.launcher.pid(event.member)}")
            parent = int((process / "stat").read_text().split()[3])
            next_one[:] = [((process / "cmdline").read_text(), parent)]
        if isinstance(event.what, StepDone) and event.what.step >= 20 and not run.struck:
            assert isinstance(processes.launcher, LocalLauncher)
            if not nurseries:
                processes.launcher.close_nursery("server")
            run.beating.strike(processes, [processes.machine.coordinator])

    run = BeatenRun(tiny("servers=2", "parity=1"), on_event=strike)
    assert run.run()["digest"] == undisturbed()
    [(command, parent)] = next_one
    assert ("nursery" in command) == nurseries
    assert parent == os.getpid()


def test_two_jobs_at_once_in_one_process_do_not_take_each_others_trainers() -> None:
    late = BeatenRun(tiny("parity=1", "servers=2", "steps=200"), [Blow(150, ("trainer:0",))])
    digests: list[str] = []
    thread = threading.Thread(target=lambda: digests.append(late.run()["digest"]))
    thread.start()
    assert JobRun(tiny("parity=1", "servers=2")).run()["digest"] == undisturbed()
    thread.join(120)
    assert digests == [undisturbed("steps=200")]
    assert len(late.killed) == 1
    reaps = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(nursery.PR_GET_CHILD_SUBREAPER, ctypes.byref(reaps))
    assert reaps.value == 0  # as it was before


def test_a_trainer_that_somebody_else_has_buried_is_no_error() -> None:
    with subprocess.Popen(["sleep", "60"], stdin=-1) as process:
        assert process.stdin is not None
        forked = nursery.Forked(process.pid, process.stdin)
        with pytest.raises(subprocess.TimeoutExpired):
            forked.wait(0.01)
        forked.kill()
        process.wait()
        assert forked.wait() == 0
        forked.kill()  # nobody


# ---------------------------------------------------------------------------- frozen


def test_a_frozen_server_is_replaced_and_killed() -> None:
    """Silence is enough: nobody waits for it to wake, and its memory is freed."""
    frozen_at: list[float] = []
    silent_at: list[float] = []

    def freeze(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, StepDone) and event.what.step >= 20 and not frozen_at:
            frozen_at.append(processes.signal("server-1", signal.SIGSTOP))
        if isinstance(event.what, Silent) and event.what.member == "server-1":
            silent_at.append(event.at)

    config = tiny("servers=5", "parity=2", "cluster.heartbeat_limit_ms=1500")
    short = Freeze("server", 2, 1, 5, seconds=0.2)  # a control: not long enough to matter
    to_the_end = Freeze("spare", 0, 1, 90, seconds=600)  # must not hold up the end
    run = BeatenRun(config, schedule=[short, to_the_end], on_event=freeze)
    assert run.run()["digest"] == undisturbed()
    assert 1.3 < silent_at[0] - frozen_at[0] < config.cluster.deadline_s
    codes = {member: exited.code for member, exited in run.of(Exited)}
    assert codes["server-1"] == -signal.SIGKILL
    assert "server-2" not in codes


class FreezesTheSpareFirst(Watcher):
    """The spare is frozen for good after step 20, and a server killed so much later."""

    def __init__(self, later_s: float) -> None:
        self.later_s = later_s
        self.frozen: tuple[str, float] | None = None
        self.killed_at = 0.0
        self.steps_at: list[float] = []  # from then on

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        if isinstance(event.what, StepDone):
            if event.what.step == 20 and self.frozen is None:
                [spare] = processes.machine.spares
                self.frozen = spare, processes.signal(spare, signal.SIGSTOP)
            if self.killed_at:
                self.steps_at.append(event.at)

    def on_tick(self, now: float, processes: Attempt) -> None:
        if self.frozen and not self.killed_at and now >= self.frozen[1] + self.later_s:
            self.killed_at = processes.signal("server-1")

    def pauses_after(self) -> int:
        return 0 if self.killed_at else 20


@pytest.mark.parametrize("later_s", [0.0, 3.0])
def test_a_frozen_spare_is_killed_and_a_server_that_dies_then_is_replaced(later_s: float) -> None:
    """It was forgotten after 2 s, and put into the place of the next server to die, where nobody
    missed it: the job stood still for more than a minute.
    """
    blows = FreezesTheSpareFirst(later_s)
    config = tiny("servers=3", "parity=1", "cluster.heartbeat_limit_ms=2000")
    run = BeatenRun(config, observers=[blows])
    assert run.run()["digest"] == undisturbed()
    assert blows.frozen
    assert {"server-1", blows.frozen[0]} <= set(run.killed)
    # The step after the kill may have had its rows already; a later one has not.
    assert max(b - a for a, b in pairwise([blows.killed_at, *blows.steps_at])) < 15


class HeldUp(Watcher):
    """A process stands still for some seconds as soon as it is started."""

    def __init__(self, member: str, seconds: float) -> None:
        self._member, self._seconds, self._since = member, seconds, 0.0

    def on_tick(self, now: float, processes: Attempt) -> None:
        if self._member in processes.launcher.processes and not self._since:
            self._since = now
            processes.launcher.signal(self._member, signal.SIGSTOP)
        elif self._since and now - self._since > self._seconds:
            self._since = math.inf
            processes.launcher.signal(self._member, signal.SIGCONT)


def test_a_trainer_that_was_started_in_vain_has_no_say_in_the_digest() -> None:
    """A replacement that takes longer to start than the deadline is asked for twice.

    The one too many reported the digest of a network that it had never trained.
    """

    def close_nursery(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, StepDone):
            assert isinstance(processes.launcher, LocalLauncher)
            processes.launcher.close_nursery("trainer")  # a trainer starts too fast with it

    config = tiny("servers=2", "parity=1", "cluster.deadline_s=1.1")
    late = [HeldUp("trainer-1", 3.0)]
    run = BeatenRun(config, [Blow(10, ("trainer:0",))], on_event=close_nursery, observers=late)
    assert run.run()["digest"] == undisturbed()
    assert len(run.of(WantMore)) >= 2  # a control: it did happen


# ---------------------------------------------------------------------------- more than r


@pytest.mark.parametrize(
    ("shape", "victims", "says"),
    [
        (
            ("strategy=none", "servers=2"),
            ("server:1",),
            r"server:1 was lost, and there is no parity",
        ),
        (("servers=4", "parity=1", "k=2"), ("server:0", "server:2"), r"places \[0, 2\] are gone"),
        (
            ("servers=5", "parity=2", "k=3"),
            ("server:4", "server:1", "server:3"),
            r"places \[1, 3, 4\] are gone",
        ),
        (("servers=3", "parity=1"), ("trainer:0", "server:0"), "nobody is left"),
    ],
)
def test_more_losses_than_parity_end_the_job_at_once_with_a_sentence(
    folder: Path, shape: tuple[str, ...], victims: tuple[str, ...], says: str
) -> None:
    run = BeatenRun(tiny(*shape, "spares=0"), [Blow(10, victims, 3.0)])
    with pytest.raises(LossError, match=says) as raised:
        run.run()
    assert time.monotonic() - run.beating.struck_at < run.config.cluster.deadline_s
    assert processes_of(folder) == []
    if victims[0].startswith("server") and run.config.r:
        named = re.findall(r"\[[\d, ]+\]", str(raised.value))[1:]
        lost = {int(victim.partition(":")[2]) for victim in victims}
        assert named, raised.value
        for group in named:
            members = set(map(int, group.strip("[]").split(",")))
            assert len(members & lost) > run.config.r, raised.value


# ---------------------------------------------------------------------------- errors, not faults


def test_data_that_ends_too_soon_ends_the_job_with_a_sentence_and_is_not_tried_again(
    folder: Path,
) -> None:
    """A trainer that found too few samples was replaced for ever by one that found as few."""
    draw = random.Random(1)
    lines = [
        [draw.randint(0, 1), *(draw.randrange(100) for _ in range(13))]
        + [f"{draw.randrange(2**32):08x}" for _ in range(26)]
        for _ in range(640)
    ]
    file = folder / "short.tsv"
    file.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
    run = BeatenRun(
        tiny("servers=2", "parity=1", "model.tables=26", "data.source=criteo", f"data.path={file}")
    )
    with pytest.raises(ClusterError, match=r"^step 11 wants .* its 640 suffice for 10 steps;"):
        run.run()
    file.unlink()
    assert run.progress.step >= 8  # it ran as far as the data went
    assert run.of(WantMore) == []


def test_data_that_is_not_criteos_is_refused_before_anything_starts(folder: Path) -> None:
    job = ("model.tables=26", "data.source=criteo")
    try:
        for content, says in (("1\t2\n", "line 1"), ("", "is empty")):
            (folder / "data.tsv").write_text(content)
            with pytest.raises(DataError, match=says):
                JobRun(tiny(*job, f"data.path={folder / 'data.tsv'}"))
    finally:
        (folder / "data.tsv").unlink()


def test_a_scrub_of_a_dead_job_does_not_wait_for_it(folder: Path) -> None:
    files = JobFiles.fresh()
    try:
        files.create(tiny(), Beginning("job"))
        (files.folder / "coordinator.address").write_text("ipc:///nowhere")
        assert running_jobs() == [files.folder]  # a control: this process is there
        (files.folder / "supervisor").unlink()
        (files.folder / "supervisor").touch()  # that nobody has a lock on
        assert running_jobs() == []
        with pytest.raises(ConfigError, match="no job runs in"):
            scrub(files.folder, 60)
    finally:
        files.remove()


def test_how_a_process_ended_is_told_where_nobody_is_told_of_children(folder: Path) -> None:
    """Where SIGCHLD was inherited as ignored, the kernel buried them, and nobody saw how."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        report = BeatenRun(tiny("servers=2", "parity=1"), [Blow(10, ("server:1",))]).run()
    finally:
        signal.signal(signal.SIGCHLD, before)
    (failure,) = report["failures"]
    assert (failure["who"], failure["reason"]) == ("server:1", "killed by SIGKILL")


def test_a_lost_job_leaves_a_report_and_exit_code_3(folder: Path) -> None:
    file = folder / "report.json"
    sets = [f"--set={pair}" for pair in (*TINY, "servers=3", "parity=1", "k=2", "spares=0")]
    options = ["--kill=server:any*2@10", f"--report={file}"]
    done = subprocess.run(
        [sys.executable, "-m", "planaria", "train", *sets, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    report = json.loads(file.read_text())
    file.unlink()
    assert report["failed"] in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    # Of the last one that was computed no server is known to have the gradients.
    assert 9 <= report["steps"] == report["loss_curve"][-1][0] - 1
    assert report["samples"] == report["steps"] * report["config"]["batch"]
    assert len(report["failures"]) == 2


def test_an_address_of_another_machine_is_refused_before_anything_starts() -> None:
    nowhere = "cluster.host=203.0.113.1"  # reserved for documentation: nobody has it
    with pytest.raises(ConfigError, match=r"cluster\.host: cannot listen on 203\.0\.113\.1"):
        JobRun(tiny("servers=2", "parity=1", "cluster.transport=tcp", nowhere)).run()


@pytest.mark.parametrize("told", [ServerHolds, HeldOut])
def test_whoever_dies_after_the_last_step_is_not_missed(folder: Path, told: type) -> None:
    """What it holds was told before, or a replacement tells it."""

    def strike(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, told) and not run.struck:
            run.beating.strike(processes, [event.member])

    run = BeatenRun(tiny("servers=3", "parity=1", "trainers=1"), on_event=strike)
    assert run.run()["digest"] == undisturbed()
    assert len(run.struck) == 1


# ---------------------------------------------------------------------------- every way out


def command_lines(folder: Path) -> list[str]:
    return [Path(f"/proc/{n}/cmdline").read_text() for n in processes_of(folder)]


# Python ignores SIGINT where whoever started the tests did, as a shell does in the background.
DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from planaria.cluster.run import JobRun
from planaria.config import Config
JobRun(Config.load(None, sys.argv[1:]), (), lambda line, at: print(at.step, flush=True)).run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("when", ["at the start", "in the middle"])
def test_a_signal_to_the_supervisor_leaves_nothing_behind(
    folder: Path, number: signal.Signals, when: str
) -> None:
    overrides = [*TINY, "servers=3", "parity=1", "steps=1000000"]
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PLANARIA_HOME": str(folder)},
    ) as driver:
        assert driver.stdout is not None
        if when == "at the start":
            assert wait_until(lambda: len(children_of(driver.pid)) >= 3, 30)
        else:
            while int(driver.stdout.readline()) < 5:
                pass
            assert len(processes_of(folder)) == 6  # with a coordinator and a spare
            assert len(children_of(driver.pid)) == 8  # and nurseries
        children = children_of(driver.pid)
        driver.send_signal(number)
        driver.communicate(timeout=30)
        assert driver.returncode in (-number, 1)
    assert wait_until(lambda: processes_of(folder) == [], GONE_S), command_lines(folder)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), GONE_S)
    assert wait_until(lambda: left_behind(folder) == [], GONE_S), left_behind(folder)


def test_an_exception_in_the_parent_leaves_nothing_behind(folder: Path) -> None:
    def fail(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, StepDone):
            assert len(processes_of(folder)) == 6
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BeatenRun(tiny("servers=3", "parity=1"), on_event=fail).run()
    assert processes_of(folder) == []


# ---------------------------------------------------------------------------- a server process


def test_a_server_ends_with_its_supervisor() -> None:
    config, files = tiny("servers=2", "parity=1"), JobFiles.fresh()
    keys = files.create(config, Beginning("job"))
    supervisor = open_transport("supervisor", keys, files.bind_address(config, "supervisor"))
    (files.folder / "supervisor.address").write_text(supervisor.address)
    with subprocess.Popen(
        [sys.executable, "-m", "planaria.cluster", "server", str(files.folder), "server-0", "0"],
        stdin=subprocess.PIPE,
    ) as server:
        assert server.stdin is not None
        said: list[Envelope] = []
        while not said:  # that it has connected is the first thing to be heard of it
            assert supervisor.poll(30_000)
            said += supervisor.receive()
        assert said[0].sender == "server-0"
        server.stdin.close()
        assert server.wait(GONE_S) == EXIT_ORPHAN
    supervisor.close()
    files.remove()


def test_servers_and_the_coordinator_never_import_torch() -> None:
    code = (
        "import sys, planaria.cluster.server_node, planaria.cluster.coordinator_node\n"
        "print('torch' in sys.modules)\n"
        "import planaria.cluster.built_in\n"
        "print('torch' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert said.split() == ["False", "True"]


def test_connections_are_encrypted_unless_they_cannot_leave_the_machine() -> None:
    def encrypted(transport: str, host: str, encryption: str = "auto") -> bool:
        return ClusterConfig(transport=transport, host=host, encryption=encryption).encrypted

    assert not any(encrypted("tcp", host) for host in ("127.0.0.1", "127.8.9.1", "localhost"))
    assert all(encrypted("tcp", host) for host in ("0.0.0.0", "10.0.0.5", "node-7", "*"))
    assert not encrypted("ipc", "10.0.0.5")
    assert encrypted("tcp", "127.0.0.1", "on")
    assert not encrypted("tcp", "10.0.0.5", "off")
