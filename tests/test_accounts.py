"""What the kernel tells of processes: the signal that ended one, a lack of memory, and work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_jobs import wait_until

from planaria.cluster import accounts
from planaria.cluster.accounts import RECENT_S, OomKills, name_of_signal, work_of
from planaria.cluster.files import JobFiles
from planaria.cluster.launcher import LocalLauncher
from planaria.cluster.scripts import how_it_ended
from planaria.config import Config


@pytest.mark.parametrize(
    ("number", "name"),
    [(9, "SIGKILL"), (34, "SIGRTMIN"), (40, "SIGRTMIN+6"), (33, "signal 33"), (64, "SIGRTMAX")],
)
def test_every_signal_has_a_name(number: int, name: str) -> None:
    assert name_of_signal(number) == name
    assert how_it_ended(-number) == f"was killed by {name}"


def test_a_process_that_a_real_time_signal_ends_is_one_that_has_ended(tmp_path: Path) -> None:
    """The supervisor ended with a ValueError."""
    (tmp_path / "logs").mkdir()
    launcher = LocalLauncher(Config(), JobFiles(tmp_path))
    child = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    launcher._keep("server", "server-9", child)
    child.send_signal(40)
    child.wait()
    ((_, ended),) = launcher.ended()
    assert (ended.code, ended.last_words) == (-40, "killed by SIGRTMIN+6")
    launcher.close()


# ------------------------------------------------------------------ memory


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the kernel's that counts its kills."""
    monkeypatch.setattr(accounts, "OOM_COUNTS", (tmp_path / "none", tmp_path / "vmstat"))
    count(tmp_path / "vmstat", 3)
    return tmp_path / "vmstat"


def count(path: Path, kills: int) -> None:
    path.write_text(f"nr_free_pages 7\noom_kill {kills}\n")


def test_a_lack_of_memory_long_before_a_death_has_not_caused_it(counted: Path) -> None:
    """Somebody else's process, hours ago, made `kill -9` read as a lack of memory."""
    kills = OomKills(0.0)
    count(counted, 4)
    for now in range(1, int(3 * RECENT_S)):
        kills.tick(float(now))
    assert not kills.explains_a_death()


def test_a_lack_of_memory_shortly_before_a_death_explains_that_one_alone(counted: Path) -> None:
    kills = OomKills(0.0)
    assert not kills.explains_a_death()
    for now in range(100):
        kills.tick(float(now))
    count(counted, 5)  # a process with much memory takes a while to end
    for now in range(100, 100 + int(RECENT_S)):
        kills.tick(float(now))
    assert [kills.explains_a_death() for _ in range(3)] == [True, True, False]


def test_a_kernel_that_does_not_count_explains_nothing(counted: Path) -> None:
    counted.unlink()
    kills = OomKills(0.0)
    kills.tick(2 * RECENT_S)
    assert not kills.explains_a_death()


# ------------------------------------------------------------------ work


@pytest.mark.parametrize(
    ("program", "works"),
    [
        ("while True: pass", True),
        ("import time\nwhile True: open('/dev/null', 'w').write('x'); time.sleep(0.05)", True),
        ("import subprocess; subprocess.run([sys.executable, '-c', 'while True: pass'])", True),
        ("import time; time.sleep(600)", False),
    ],
    ids=["computes", "writes", "has a child that computes", "sleeps"],
)
def test_a_process_works_where_it_or_its_children_compute_read_or_write(
    program: str, works: bool
) -> None:
    told = f"import sys; print('begins', flush=True); {program}".replace("; while", "\nwhile")
    with subprocess.Popen(
        [sys.executable, "-c", told], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            before = [work_of(process.pid)]

            def changed() -> bool:
                before.append(work_of(process.pid))
                return before[-1] != before[-2]

            if works:
                assert all(wait_until(changed, 10.0) for _ in range(3))
            else:
                wait_until(lambda: False, 0.5)  # it is on its way to sleep
                before.append(work_of(process.pid))
                assert not wait_until(changed, 1.0)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_work_of_a_process_that_is_gone_is_none() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    assert work_of(process.pid) == 0
