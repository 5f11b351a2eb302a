"""Everything dies, or the disk is full, or a bit flips: jobs on real processes go on from files.

Every run costs some seconds of start-up, so the runs of this file share what they can: one long
undisturbed run leaves a checkpoint every ten steps, which the others resume from.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cluster_jobs import TINY, BeatenRun, Blow, leaving_nothing, tiny

from planaria import Layout
from planaria.checkpoints import latest, list_checkpoints, restore
from planaria.checkpoints.folders import LocalFolder
from planaria.checkpoints.manifest import encode_manifest, read_manifest
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Note
from planaria.cluster.resuming import find_start, load_saved
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.errors import ConfigError
from planaria.records import RamRecords
from planaria.wire.control import StepDone

pytestmark = pytest.mark.torch

STEPS, EVERY = 60, 10
SHAPE = (f"steps={STEPS}", "servers=4", "parity=1", "k=2", "spares=1")
PLAIN = ("strategy=none", "servers=2", "spares=0")  # quick to start
KILL_S = 60.0
LIMIT_S = 240.0  # for one command, on a machine that has other things to do


def saving(folder: Path, *overrides: str) -> Config:
    save = (f"checkpoint.path={folder}", f"checkpoint.every_steps={EVERY}")
    return tiny(*SHAPE, *save, "checkpoint.keep_last=100", *overrides)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


class Undisturbed:
    """Nobody disturbs it and nothing protects it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report: dict[str, Any] = JobRun(saving(folder, *PLAIN)).run()

    @property
    def digest(self) -> str:
        return str(self.report["digest"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed") / "job")


def content(folder: Path, step: int) -> tuple[list[bytes], bytes]:
    """All records as one server would hold them, and the dense state."""
    found = next(one.checkpoint for one in list_checkpoints(folder) if one.step == step)
    assert found is not None
    layout = Layout.fresh(1, 0)
    out = [np.zeros((layout.arena(a.rows).records(0), a.words), np.uint32) for a in found.arenas]
    restore(found, found.arenas, layout, 0, list(map(RamRecords, out)))
    return [records.tobytes() for records in out], found.dense()["dense"].tobytes()


def whole_steps(folder: Path) -> list[int]:
    return [one.step for one in list_checkpoints(folder) if one.checkpoint]


# ---------------------------------------------------------------------------- saving


def test_saving_changes_no_bit_and_every_checkpoint_is_reported(undisturbed: Undisturbed) -> None:
    saved = undisturbed.report["checkpoints"]
    assert [one["step"] for one in saved] == list(range(EVERY, STEPS + 1, EVERY))
    assert whole_steps(undisturbed.folder) == [one["step"] for one in saved]
    assert all(one["bytes"] > 6 * 300 * 2 * 8 * 4 and one["seconds"] > 0 for one in saved)
    assert undisturbed.report["resumed_from"] is None
    assert len({content(undisturbed.folder, one["step"])[1] for one in saved}) == len(saved)


def parts_of(folder: Path, step: int) -> dict[str, bytes]:
    """The content of each part; its name ends in a random token."""
    found = (folder / f"step-{step:08d}").glob("*.part")
    return {re.sub(r"(-[0-9a-f]{8}){2}.part", "", path.name): path.read_bytes() for path in found}


def test_what_is_saved_while_training_goes_on_is_what_is_saved_while_it_waits(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    report = JobRun(saving(tmp_path / "job", *PLAIN, "checkpoint.mode=sync")).run()
    assert report["digest"] == undisturbed.digest
    for one in report["checkpoints"]:
        assert 0 < one["blocked_s"] <= one["seconds"] + 0.1
        found = parts_of(tmp_path / "job", one["step"])
        assert found.keys() == {"dense", "place-00000", "place-00001"}
        assert found == parts_of(undisturbed.folder, one["step"])


def test_a_server_killed_between_two_saves_spoils_none_of_them(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = BeatenRun(saving(tmp_path / "job"), [Blow(23, ("server:1",)), Blow(43, ("trainer:0",))])
    report = run.run()
    assert len(run.killed) == 2
    assert report["digest"] == undisturbed.digest
    failed = {one["step"]: one["failed"] for one in report["checkpoints"] if "failed" in one}
    steps = whole_steps(tmp_path / "job")
    assert sorted([*failed, *steps]) == list(range(EVERY, STEPS + 1, EVERY))
    # What a victim was just writing is lost, and a replacement may be late for the next.
    assert {10, 60} <= {*steps}, failed
    assert all("ended before" in why or "being rebuilt" in why for why in failed.values()), failed
    for step in steps:
        assert content(tmp_path / "job", step) == content(undisturbed.folder, step)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """For the processes that are started meanwhile, too: a file that grows beyond it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_no_training_and_stands_in_the_report(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    lines: list[str] = []
    with largest_file(20_000):  # room for a dense part, not for a server's
        config = saving(tmp_path / "job", *PLAIN)
        report = JobRun(config, (), lambda line, _: lines.append(line)).run()
    assert report["digest"] == undisturbed.digest
    assert [one["step"] for one in report["checkpoints"]] == list(range(EVERY, STEPS + 1, EVERY))
    assert all("no space is left" in one["failed"] for one in report["checkpoints"])
    assert any("no part of server:" in line and "no space" in line for line in lines)
    assert list_checkpoints(tmp_path / "job") == []  # what was written makes room again


# ---------------------------------------------------------------------------- a folder vanishes

SLOW = ("steps=100", "batch=1024")  # so that a save counts long before the end


class Meddled(BeatenRun):
    """Somebody does something to its folder, once, when it has a checkpoint."""

    def __init__(self, folder: Path, meddle: Callable[[], object], *overrides: str) -> None:
        self.saved: list[int] = []  # by then

        def look(processes: Attempt, event: JobEvent) -> None:
            if isinstance(event.what, StepDone) and not self.saved and self.job.saves.newest():
                self.saved = whole_steps(folder)
                meddle()

        super().__init__(saving(folder, *PLAIN, *SLOW, *overrides), on_event=look)

    @property
    def notes(self) -> list[str]:
        return [note.line for _, note in self.of(Note)]


@pytest.mark.parametrize("what", ["LEASE.json", "."])
def test_a_lease_or_a_folder_that_vanishes_once_costs_the_saves_of_that_moment_alone(
    tmp_path: Path, what: str
) -> None:
    """No later save counted, not even the last: the only job was to stop one of the jobs."""
    folder = tmp_path / "job"
    run = Meddled(
        folder, lambda: (folder / what).rename(tmp_path / "away"), "checkpoint.policy=consecutive"
    )
    report = run.run()
    assert sum("has taken the folder again" in line for line in run.notes) == 1
    failed = [one for one in report["checkpoints"] if "failed" in one]
    assert whole_steps(folder)[-1] == 100
    assert not any("lost its lease" in one["failed"] for one in failed)
    saved = {one["step"]: one for one in report["checkpoints"] if "failed" not in one}
    later = [step for step in saved if step > max(run.saved)]
    assert later
    if what == ".":  # nothing is built on what is gone
        assert saved[later[0]]["base"] == []
    assert not (folder / "LEASE.json").exists()  # it was given back


def test_who_names_a_way_back_has_looked(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Step 80 was named as the way back, out of a folder that had long been another job's."""
    folder = tmp_path / "job"

    def replace_it() -> None:
        folder.rename(tmp_path / "away")
        (folder / "step-00000200").mkdir(parents=True)
        theirs = latest(undisturbed.folder).checkpoint
        assert theirs is not None
        manifest = msgspec.structs.replace(theirs.manifest, step=200)
        content, _ = encode_manifest(manifest)
        (folder / "step-00000200" / "MANIFEST.json").write_bytes(content)

    # The first save is whole long before the second, and last, one begins, whoever is late.
    rarely = ("steps=200", "checkpoint.every_steps=100", "checkpoint.mode=sync")
    run = Meddled(folder, replace_it, *rarely, "checkpoint.keep_last=1")
    report = run.run()
    assert report["checkpoints"][-1]["step"] == 200
    assert "was saved by another job" in report["checkpoints"][-1]["failed"]
    assert run.saved == [100]
    assert run.job.way_back() == (
        f"; there is nothing to go on from: {folder} has no whole checkpoint of this job"
    )


def test_a_file_in_the_place_of_the_folder_is_to_be_moved_away(tmp_path: Path) -> None:
    """Room was to be made."""
    folder = tmp_path / "job"

    def replace_it() -> None:
        folder.rename(tmp_path / "away")
        folder.write_text("a file")

    run = Meddled(folder, replace_it)
    last = run.run()["checkpoints"][-1]
    assert last["step"] == 100
    assert "move away what is no folder and has the name of one" in last["failed"]
    assert "oom" not in last["failed"]
    assert "there is nothing to go on from: " in run.job.way_back()
    assert folder.read_text() == "a file"


# ---------------------------------------------------------------------------- resuming


def copied(undisturbed: Undisturbed, folder: Path, up_to: int) -> Path:
    """The checkpoints up to a step, as a job that was cut off there leaves them."""
    for step in range(EVERY, up_to + 1, EVERY):
        name = f"step-{step:08d}"
        shutil.copytree(undisturbed.folder / name, folder / name)
    return folder


def flip_a_bit(folder: Path, step: int) -> None:
    part = sorted((folder / f"step-{step:08d}").glob("place-*.part"))[1]
    torn = bytearray(part.read_bytes())
    torn[len(torn) // 2] ^= 4
    part.write_bytes(torn)


def test_a_flipped_bit_is_passed_over_and_another_layout_gives_the_same_digest(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    folder = copied(undisturbed, tmp_path / "job", 50)
    flip_a_bit(folder, 50)
    layout = ("servers=5", "parity=1", "k=3", "spares=0", "scrub.every_steps=1")
    config = saving(folder, *layout, "checkpoint.keep_last=1")
    start = find_start(config, resume=True)
    assert start.step == 40
    assert "passed over step 50: " in start.notes[0]
    assert "place-00001" in start.notes[0]
    report = JobRun(config, start=start).run()
    assert report["digest"] == undisturbed.digest
    assert report["resumed_from"] == 40
    assert report["scrubbed"]["records"] > 0
    assert report["scrubbed"]["wrong"] == 0
    assert [one["step"] for one in report["checkpoints"]] == [50, 60]
    assert whole_steps(folder) == [60]
    assert content(folder, 60) == content(undisturbed.folder, 60)


def test_another_learning_rate_gives_another_digest(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """A control: what is resumed is trained on, and its digest tells how."""
    folder = copied(undisturbed, tmp_path / "job", 50)
    config = saving(folder, *PLAIN, "optimizer.lr=0.021")
    start = find_start(config, resume=True)
    assert "optimizer.lr was 0.02 and is 0.021 from here on" in start.notes[1]
    assert JobRun(config, start=start).run()["digest"] != undisturbed.digest


CANNOT_READ = """
import errno, os, sys

def refuse(event, arguments):
    if event != "open" or not str(arguments[0]).endswith(".part"):
        return
    if os.readlink("/proc/self/fd/2").endswith("server-1.log"):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), arguments[0])

sys.addaudithook(refuse)
"""


def test_a_server_that_cannot_read_the_checkpoint_is_replaced(
    undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to end the job, although the others have all that a replacement needs."""
    (tmp_path / "sitecustomize.py").write_text(CANNOT_READ)
    folder = copied(undisturbed, tmp_path / "job", 50)
    config = saving(folder)
    start = find_start(config, resume=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = JobRun(config, start=start).run()
    assert report["digest"] == undisturbed.digest
    (failure,) = report["failures"]
    assert failure["who"] == "server:1"
    assert "Too many open files" in failure["reason"]


def command(folder: Path, *options: str) -> list[str]:
    save = [f"checkpoint.path={folder}", f"checkpoint.every_steps={EVERY}"]
    sets = [option for pair in (*TINY, *SHAPE, *PLAIN, *save) for option in ("--set", pair)]
    return [sys.executable, "-m", "planaria", "train", *sets, *options]


def kill_when(folder: Path, saving_now: bool, after: int, *options: str) -> None:
    """Runs the command and kills -9 its supervisor, and so all, during a save or after one."""
    with subprocess.Popen(
        command(folder, *options), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as job:
        deadline = time.monotonic() + KILL_S

        def instant() -> bool:
            steps = {int(path.name[5:]) for path in folder.glob("step-*")}
            whole = {int(path.parent.name[5:]) for path in folder.glob("step-*/MANIFEST.json")}
            if saving_now:  # a slow disk may be at two saves at once, and have none whole so far
                return bool(whole) and any(step > after for step in steps - whole)
            return max(steps, default=0) > after

        while not instant():
            assert job.poll() is None, job.stderr and job.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        job.send_signal(signal.SIGKILL)
        job.communicate(timeout=30)
        assert job.returncode == -signal.SIGKILL


def test_kill_9_of_everything_during_a_save_and_between_two_loses_no_bit(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    folder, report = tmp_path / "job", tmp_path / "report.json"
    kill_when(folder, True, 10)  # while that of step 20 or a later one is being written
    first = latest(folder, verify=True)
    assert first.checkpoint is not None
    assert first.checkpoint.step >= 10
    kill_when(folder, False, first.checkpoint.step, "--resume")
    done = subprocess.run(
        command(folder, "--resume", "--report", str(report)),
        capture_output=True,
        text=True,
        timeout=KILL_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["digest"] == undisturbed.digest
    assert found["resumed_from"] >= first.checkpoint.step
    assert "resuming from step" in done.stdout
    assert len(whole_steps(folder)) == 2  # keep_last


def test_without_a_job_file_a_job_goes_on_with_the_settings_that_it_was_saved_with(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The README's command was refused for a key that nobody had given: the defaults were others
    than the first run's.
    """
    folder = copied(undisturbed, tmp_path / "job", 50)
    report = tmp_path / "report.json"
    words = ["--set", f"checkpoint.path={folder}", "--set", "servers=3", "--report", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "planaria", "train", "--resume", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "COLUMNS": "400"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"the settings are those that step 50 in {folder} was saved with" in done.stdout
    found = json.loads(report.read_text())
    assert found["digest"] == undisturbed.digest
    assert found["strategy"] == "none"  # as saved
    assert len(found["checkpoints"]) == 1
    saved = latest(folder).checkpoint
    assert saved is not None
    assert saved.manifest.config["servers"] == 3  # --set comes on top


def test_settings_of_a_checkpoint_are_the_base_only_where_there_are_some(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    assert load_saved(["steps=7"]) == (Config.load(None, ["steps=7"]), ())
    empty = [f"checkpoint.path={tmp_path}", "steps=7"]
    assert load_saved(empty) == (Config.load(None, empty), ())
    as_saved, notes = load_saved([f"checkpoint.path={undisturbed.folder}"])
    assert (as_saved, len(notes)) == (saving(undisturbed.folder, *PLAIN), 1)
    folder = copied(undisturbed, tmp_path / "job", 10)
    manifest, _ = read_manifest(LocalFolder(folder / "step-00000010"), 10)
    strange = msgspec.structs.replace(manifest, config={"no_such_key": 1})
    (folder / "step-00000010" / "MANIFEST.json").write_bytes(encode_manifest(strange)[0])
    with pytest.raises(ConfigError, match="not known here; give the job file\nno_such_key"):
        load_saved([f"checkpoint.path={folder}"])
    with pytest.raises(ConfigError, match="steps: expected"):
        load_saved([f"checkpoint.path={undisturbed.folder}", "steps=0"])


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.rows=301", "model: expected the tables of the checkpoint of step 60, 6 [(]300 x 8"),
        ("optimizer.name=sgd", "optimizer.name: expected adagrad, as in the checkpoint of step 60"),
        ("optimizer.eps=1e-5", "optimizer.eps: expected 1e-10"),
        (
            "seed=1",
            "seed: expected 0, as in the checkpoint of step 60, got 1; give the same job file",
        ),
        ("batch=32", "batch: expected 64"),
        ("trainers=2", "trainers: expected 1"),
        ("model.top=[8]", r"model.top: expected \[16\]"),
        ("steps=59", "steps: expected 60 or more"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_by_the_name_of_its_key(
    undisturbed: Undisturbed, override: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        find_start(saving(undisturbed.folder, override), resume=True)


def test_what_needs_not_fit_is_not_refused(undisturbed: Undisturbed) -> None:
    config = saving(undisturbed.folder, "steps=500", "servers=9", "parity=3", "threads.server=2")
    start = find_start(config, resume=True)
    assert start.step == 60
    assert start.notes == (f"resuming from step 60 in {undisturbed.folder}",)


def test_a_new_job_does_not_mix_its_checkpoints_with_those_of_another(
    undisturbed: Undisturbed,
) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.path: .*has one of step 60; .*--resume"):
        find_start(saving(undisturbed.folder), resume=False)


def test_nothing_to_resume_from_is_said_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "job" / "step-00000010").mkdir(parents=True)
    done = subprocess.run(
        command(tmp_path / "job", "--resume"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "400"},
    )
    assert done.returncode == 2
    assert "nothing to resume from" in done.stderr
    assert "passed over step 10" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(ConfigError, match=r"checkpoint.path: expected .*--resume"):
        find_start(tiny(), resume=True)
