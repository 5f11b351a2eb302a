"""What a machine cannot carry is refused before anything starts, all of it at once."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest

from planaria.cluster import preflight
from planaria.cluster.facts import Facts, read_facts
from planaria.cluster.lending import LENT_BYTES
from planaria.config import Config
from planaria.errors import ConfigError
from planaria.server.store import Store
from planaria.tables import make_arenas

GB = 10**9
ENOUGH = Facts(memory_bytes=64 * GB, descriptors=20_000, tasks=10_000)


def job(*overrides: str) -> Config:
    return Config.load(None, overrides)


def refusals(config: Config, facts: Facts = ENOUGH, folder: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        preflight.check(config, facts=facts, folder=folder)
    return str(caught.value).splitlines()


def test_the_default_job_is_carried_without_a_word() -> None:
    assert preflight.check(job(), facts=ENOUGH) == []
    assert preflight.check(job(), facts=Facts()) == [], "no limit that is known is no limit"


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    config = job(f"checkpoint.path={in_the_way}/below", "cluster.transport=ipc")
    said = refusals(config, Facts(GB, 64, 8), tmp_path / ("x" * 100))
    keys = [line.partition(":")[0] for line in said]
    assert keys == ["trainers", "servers", "servers", "cluster.transport", "checkpoint.path"]


# ---------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("keys", [[], ["servers=3"], ["parity=2", "optimizer.name=adam"]])
def test_records_and_parity_are_counted_as_the_servers_hold_them(keys: list[str]) -> None:
    config = job("model.tables=3", "model.rows=[1000, 77, 5]", *keys)
    arenas = make_arenas(config.tables, config.optimizer_rule)
    held = [Store(arenas, config.layout, place).memory() for place in config.layout.places]
    needed = preflight.memory_needed(config)
    validity = sum(memory.validity for memory in held)
    assert needed.parity == sum(memory.parity for memory in held)
    assert abs(needed.records - validity - sum(memory.data for memory in held)) <= config.servers
    assert needed.total > needed.records + needed.parity + needed.history


def test_a_model_that_does_not_fit_is_refused_with_its_sizes() -> None:
    [said] = refusals(job("model.rows=2000000000"))
    for part in (
        "model.rows: the job needs 9.7 TB of memory on this machine",
        "records 6.7 TB, parity 1.7 TB, history",
        "but 64.0 GB are free; lower rows, dim or parity, raise k, do without spares, or",
    ):
        assert part in said


def test_what_mates_lend_is_counted_where_they_do() -> None:
    def needed(*keys: str) -> int:
        return preflight.memory_needed(job("cluster.transport=ipc", *keys)).processes

    pieces = ("rebuild.chunk=1", "rebuild.jobs=1")
    assert needed() - needed(*pieces) > 1 << 20
    assert needed("strategy=none") == needed("strategy=none", *pieces)
    assert needed("cluster.encryption=on") == needed("cluster.encryption=on", *pieces)
    most = needed("rebuild.chunk=10000000") - needed("cluster.encryption=on")
    assert most == job().servers * LENT_BYTES


def test_the_advice_names_what_takes_most() -> None:
    [said] = refusals(job("trainers=200"), Facts(GB))
    assert said.startswith("trainers: the job needs ")
    many_steps = job("history.steps=1000", "batch=100000", "model.rows=4000")
    [said] = refusals(many_steps, Facts(5 * GB))
    assert said.startswith("history.steps: ")
    [said] = refusals(job("strategy=none", "model.rows=2000000000"))
    assert "parity" not in said.partition(";")[2]


def test_a_job_that_nearly_fills_the_machine_is_noted() -> None:
    total = preflight.memory_needed(job()).total
    [note] = preflight.check(job(), facts=Facts(int(total * 1.1)))
    assert "of free memory" in note
    assert preflight.check(job(), facts=Facts(int(total * 1.5))) == []


# ---------------------------------------------------------------------------- limits and addresses


def test_too_few_descriptors_are_refused_with_the_number_to_set() -> None:
    config = job("servers=300", "trainers=20")
    needed = preflight.descriptors_needed(config)
    assert needed > 3 * 320
    [said] = refusals(config, Facts(descriptors=needed - 1))
    assert f"ulimit -Hn {needed}" in said
    assert preflight.check(config, facts=Facts(descriptors=needed)) == []


def test_too_few_processes_are_refused() -> None:
    needed = preflight.tasks_needed(job())
    assert "more may be started" in refusals(job(), Facts(tasks=needed - 1))[0]
    assert preflight.check(job(), facts=Facts(tasks=needed)) == []


def test_a_folder_whose_name_is_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    room = preflight.SUN_PATH_BYTES - len(preflight.SOCKET_NAME)
    fits = Path("/" + "x" * (room - 1))
    assert preflight.check(job(), facts=ENOUGH, folder=fits) == []
    [said] = refusals(job(), folder=Path(f"{fits}x"))
    assert "have 108 bytes, but 107 is the most" in said
    assert (
        preflight.check(job("cluster.transport=tcp"), facts=ENOUGH, folder=Path(f"{fits}x")) == []
    )


def test_a_home_without_room_for_views_and_logs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six coordinators in a row could not save, and none of them could say why."""
    folder = tmp_path / "jobs" / "job"
    assert preflight.check(Config(), folder=folder) == []  # a control
    usage = shutil.disk_usage(tmp_path)._replace(free=24 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"PLANARIA_HOME: .* has room for 24\.6 kB"):
        preflight.check(Config(), folder=folder)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    [said] = refusals(job("cluster.transport=tcp", f"cluster.host={host}"))
    assert said.startswith(f"cluster.host: cannot listen on {host}: ")
    assert preflight.check(job(f"cluster.host={host}"), facts=ENOUGH) == [], "ipc has no host"


# ------------------------------------------------------------------------------------ checkpoints


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    assert preflight.check(job(f"checkpoint.path={tmp_path}"), facts=ENOUGH) == []
    assert list(tmp_path.iterdir()) == []
    assert preflight.check(job("checkpoint.path=memory://job"), facts=ENOUGH) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    [said] = refusals(job(f"checkpoint.path={in_the_way}"))
    assert said.startswith(f"checkpoint.path: {in_the_way} cannot be written: ")
    [said] = refusals(job("checkpoint.path=nothing-like-this://x"))
    assert "install its fsspec driver" in said


def test_a_disk_too_small_for_one_checkpoint_is_refused_and_for_all_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(f"checkpoint.path={tmp_path}", "checkpoint.keep_last=2")
    size = preflight.checkpoint_bytes(config)
    assert size > 26 * 10_000 * 2 * 16 * 4
    for free, start, says in ((3, 0, []), (2, 0, ["room"]), (2, size, [])):
        monkeypatch.setattr(preflight, "_free_space", lambda path, free=free: free * size)
        notes = preflight.check(config, start, facts=ENOUGH)
        assert [word for note in notes for word in says if word in note] == says
        assert len(notes) == len(says)
    monkeypatch.setattr(preflight, "_free_space", lambda path: size - 1)
    assert "make room" in refusals(config)[0]
    smaller = preflight.checkpoint_bytes(job(f"checkpoint.path={tmp_path}", "checkpoint.bits=4"))
    assert smaller < size


# ------------------------------------------------------------------------------- what a machine has


def test_servers_that_would_not_fit_are_refused_before_anything_moves() -> None:
    config = job("servers=6", "parity=2", "k=3")
    preflight.check_servers(config, 6, 8, ENOUGH)
    preflight.check_servers(config, 6, 8, Facts())
    with pytest.raises(ConfigError) as caught:
        preflight.check_servers(config, 6, 8, Facts(memory_bytes=100 << 20, tasks=3))
    memory, tasks = str(caught.value).splitlines()
    assert "that takes" in memory
    assert "104.9 MB are free" in memory
    assert "2 more processes" in tasks
    with pytest.raises(ConfigError, match="open files"):
        preflight.check_servers(config, 6, 8, Facts(descriptors=50))
    preflight.check_servers(config, 8, 6, Facts(memory_bytes=GB, tasks=0))


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = "MemTotal:       24681880 kB\nMemAvailable:   20000000 kB\nHugePages_Total:       0\n"


def test_free_memory_is_what_the_machine_and_every_group_above_leave(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    put(proc, {"meminfo": MEMINFO, "self/cgroup": "0::/slice/job\n"})
    assert read_facts(proc, groups).memory_bytes == 20_000_000 * 1024
    put(groups, {
        "slice/job/memory.max": "max\n",
        "slice/job/memory.current": "3000000000\n",
        "slice/memory.max": "8000000000\n",
        "slice/memory.current": "5000000000\n",
        "slice/memory.stat": "anon 1\ninactive_file 400\nactive_file 30\nslab_reclaimable 2\n",
    })  # fmt: skip
    assert read_facts(proc, groups).memory_bytes == 3_000_000_432
    put(groups, {"slice/memory.current": "9000000000\n"})
    assert read_facts(proc, groups).memory_bytes == 0


def test_groups_of_the_first_version_count_as_well(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    put(proc, {"meminfo": MEMINFO, "self/cgroup": "4:memory:/seen/outside\n3:pids,cpu:/\n0::/\n"})
    put(groups, {
        "memory/memory.limit_in_bytes": "2000000000\n",
        "memory/memory.usage_in_bytes": "1500000000\n",
        "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 1000\n",
        "pids/pids.max": "100\n",
        "pids/pids.current": "40\n",
    })  # fmt: skip
    facts = read_facts(proc, groups)
    assert facts.memory_bytes == 500_001_000
    assert facts.tasks is not None
    assert facts.tasks <= 60


def test_this_machine_is_understood() -> None:
    facts = read_facts()
    assert facts.memory_bytes is not None
    assert facts.memory_bytes > 0
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert facts.descriptors == (None if hard == resource.RLIM_INFINITY else hard)
