"""Jobs whose records have no room in memory: one digest, whatever lies where and whatever dies."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import BeatenRun, Blow, blows, leaving_nothing, tiny, undisturbed
from scaling_jobs import Move, ScaledRun

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent
from planaria.cluster.run import JobRun
from planaria.cluster.tiering import needs_of, tier_of
from planaria.config import Config
from planaria.errors import ClusterError, ConfigError
from planaria.wire.control import StepDone

pytestmark = pytest.mark.torch

WIDE = ("model.dim=32", "model.rows=20000", "optimizer.name=adagrad", "steps=60")
PROTECTED = ("servers=4", "parity=1", "k=3", "spares=1")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


def records_of_a_server(config: Config) -> int:
    (arena,) = config.arenas
    return config.layout.arena(arena.rows).records(0)


def tiered(folder: Path, share: float, *overrides: str) -> Config:
    """With so much memory that this share of the records, or a little more, is in it."""
    without = tiny(*WIDE, *PROTECTED, *overrides)
    for percent in range(100):
        limit = needs_of(without).least * (100 + percent) // 100
        config = tiny(
            *WIDE, *PROTECTED, f"tier.ram={limit}", f"tier.path={folder}", *overrides
        )  # fmt: skip
        tier = tier_of(config)
        assert tier is not None
        if tier.slots[0] >= share * records_of_a_server(config):
            assert tier.slots[0] < 1.5 * share * records_of_a_server(config)
            return config
    raise AssertionError("no limit gives that share")


def assert_cold(report: dict[str, Any], config: Config) -> None:
    """That the job had anything to do with a disk."""
    tiers = report["tiers"]
    assert tiers["disk_bytes"] >= config.servers * records_of_a_server(config) * 256
    assert 0 < tiers["missed"] < tiers["accesses"]


@pytest.mark.parametrize("share", [0.2, 0.05])
def test_records_on_disk_change_no_bit(tmp_path: Path, share: float) -> None:
    config = tiered(tmp_path, share)
    report = JobRun(config).run()
    assert report["digest"] == undisturbed(*WIDE)
    assert_cold(report, config)
    assert list(tmp_path.iterdir()) == []


def test_with_room_for_all_no_file_is_made(tmp_path: Path) -> None:
    limit = needs_of(tiny(*WIDE, *PROTECTED)).all
    config = tiny(*WIDE, *PROTECTED, f"tier.ram={limit}", f"tier.path={tmp_path}")
    report = JobRun(config).run()
    assert report["digest"] == undisturbed(*WIDE)
    assert report["tiers"] is None


def test_killing_servers_whose_records_are_on_disk_changes_no_bit(tmp_path: Path) -> None:
    config = tiered(tmp_path, 0.05, "scrub.every_steps=15")
    plan = blows(11, [("server:1",), ("server:3", "coordinator"), ("trainer:0",)], every=15)
    run = BeatenRun(config, plan)
    report = run.run()
    assert len(run.killed) >= 3
    assert report["digest"] == undisturbed(*WIDE)
    assert report["scrubbed"]["wrong"] == 0
    assert_cold(report, config)
    assert list(tmp_path.iterdir()) == []


def test_killing_a_replacement_while_it_rebuilds_both_tiers_changes_no_bit(tmp_path: Path) -> None:
    config = tiered(tmp_path, 0.05, "rebuild.chunk=512", "rebuild.jobs=1", "spares=2")
    run = BeatenRun(config, [Blow(20, ("server:2",), 7.0)], replacements=1)
    report = run.run()
    assert len(run.killed) == 2
    assert report["digest"] == undisturbed(*WIDE)


def test_a_save_of_records_on_disk_is_gone_on_from(tmp_path: Path) -> None:
    cold, saves = tmp_path / "cold", tmp_path / "saves"
    cold.mkdir()
    config = tiered(
        cold, 0.05, f"checkpoint.path={saves}", "checkpoint.every_steps=20",
        "checkpoint.policy=consecutive", "strategy=checkpoint",
    )  # fmt: skip
    run = BeatenRun(config, [Blow(45, ("server:2",))])
    report = run.run()
    assert report["rollbacks"] != []
    assert report["digest"] == undisturbed(*WIDE)
    assert_cold(report, config)


# ---------------------------------------------------------------------------- disks that fail


def cold_file(pid: int) -> str:
    (found,) = [
        str(link)
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(link).endswith(".cold (deleted)")
    ]
    return found


class Harmed(BeatenRun):
    """Does something to one server's process after a step."""

    def __init__(self, config: Config, step: int, place: int) -> None:
        super().__init__(config, on_event=self._look)
        self.harm_at, self.place = step, place
        self.harmed = 0

    def _look(self, processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, StepDone) and event.what.step >= self.harm_at and not self.harmed:
            member = self.progress.servers[self.place]
            self.harmed = pid = processes.launcher.pid(member)
            self.harm(pid)

    def harm(self, pid: int) -> None:
        raise NotImplementedError


class Corrupts(Harmed):
    def harm(self, pid: int) -> None:
        descriptor = os.open(cold_file(pid), os.O_RDWR)
        size = os.fstat(descriptor).st_size
        for at in range(0, size, 1 << 20):
            content = bytes(byte ^ 1 for byte in os.pread(descriptor, 1 << 20, at))
            os.pwrite(descriptor, content, at)
        os.fsync(descriptor)
        os.close(descriptor)


class Fills(Harmed):
    """The disk refuses whatever is written from now on."""

    def harm(self, pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (65536, 65536))


def test_bytes_that_change_on_the_disk_are_that_server_s_death_and_change_no_bit(
    tmp_path: Path,
) -> None:
    run = Corrupts(tiered(tmp_path, 0.05), 20, 1)
    report = run.run()
    assert run.harmed
    (failure,) = report["failures"]
    assert failure["who"] == "server:1"
    assert "other bytes came back than were written" in failure["reason"]
    assert report["digest"] == undisturbed(*WIDE)


def test_a_disk_that_refuses_writes_is_that_server_s_death_and_changes_no_bit(
    tmp_path: Path,
) -> None:
    run = Fills(tiered(tmp_path, 0.05), 20, 2)
    report = run.run()
    assert run.harmed
    (failure,) = report["failures"]
    assert failure["who"] == "server:2"
    assert "cannot be written: File too large" in failure["reason"]
    assert report["digest"] == undisturbed(*WIDE)


def test_the_number_of_servers_is_fixed(tmp_path: Path) -> None:
    """Disks that have no room for more would end servers that are well."""
    run = ScaledRun(tiered(tmp_path, 0.2), [Move(10, 5)])
    assert run.states == ["refused"]
    assert run.failed == []
    with pytest.raises(ConfigError, match=r"rebuild\.by: expected replacement"):
        tiered(tmp_path, 0.2, "servers=5", "rebuild.by=survivors")


def test_too_little_memory_is_said_before_the_start_with_what_is_enough(tmp_path: Path) -> None:
    config = tiny(*WIDE, *PROTECTED, "tier.ram=100kB", f"tier.path={tmp_path}")
    needs = needs_of(config)
    with pytest.raises(ConfigError, match=f"tier.ram: expected {needs.least} or more") as caught:
        JobRun(config).run()
    assert f"With {needs.all} all records are in memory" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small disk")
def test_a_small_disk_is_refused_before_the_start_or_ends_the_job_by_name(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount here")
    try:
        with pytest.raises(ConfigError, match=r"tier\.path: .* bytes there, but .* are free"):
            JobRun(tiered(small, 0.05)).run()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_goes_away_ends_the_job_with_its_name(tmp_path: Path) -> None:
    """A replacement has nowhere to put its cold records, and neither has the next one."""
    folder = tmp_path / "cold"
    folder.mkdir()
    config = tiered(folder, 0.05, "spares=0")

    class Removes(Harmed):
        def harm(self, pid: int) -> None:
            folder.rmdir()
            os.kill(pid, 9)

    run = Removes(config, 20, 0)
    with pytest.raises(ClusterError, match=r"server:0.*cannot be opened: No such file"):
        run.run()
