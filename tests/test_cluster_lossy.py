"""Lossy lookups on real processes: whoever is killed, the digest is that of the same lossy job."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import Blow, blows, digest_after, leaving_nothing, tiny, undisturbed
from scaling_jobs import Move, ScaledRun
from script_jobs import ScriptRun, undisturbed_script

from planaria.cluster.lookups import settle_lookups
from planaria.cluster.resuming import find_start, load_saved
from planaria.cluster.run import JobRun
from planaria.config import Config
from planaria.errors import ClusterError, ConfigError

pytestmark = pytest.mark.torch

LOSSY = ("wire.lookups=lossy", "wire.encoder=huffman", "wire.sample_steps=8", "steps=60")


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


@cache
def exact_digest() -> str:
    return undisturbed("steps=60", "trainers=2")


@cache
def lossy_digest() -> str:
    return undisturbed(*LOSSY, "trainers=2")


def test_whoever_is_killed_the_digest_is_that_of_the_lossy_job() -> None:
    plan = blows(3, [("server:1", "server:2"), ("trainer:0",), ("coordinator",)], 5, 16)
    config = tiny(*LOSSY, "trainers=2", "servers=5", "parity=2", "k=2", "cluster.transport=tcp")
    assert digest_after(config, plan) == lossy_digest() != exact_digest()


def test_early_answers_packing_and_another_encoder_change_no_bit() -> None:
    more = ("wire.encoder=none", "wire.packing=on", "cluster.early_answers=on")
    config = tiny(*LOSSY, *more, "trainers=2", "servers=3", "cluster.transport=tcp")
    assert digest_after(config, [Blow(30, ("trainer:1",))]) == lossy_digest()


def test_answers_are_fewer_bytes_and_a_table_may_stay_exact() -> None:
    def report_of(*overrides: str) -> dict[str, Any]:
        return JobRun(tiny("strategy=none", "servers=2", "spares=0", *overrides)).run()

    plain = report_of("steps=60", "trainers=2")
    lossy = report_of(*LOSSY, "trainers=2")
    mixed = report_of(*LOSSY, "trainers=2", "wire.tables={table0: exact, table5: bf16}")
    half = report_of("wire.lookups=fp16", "steps=60", "trainers=2")
    assert len({one["digest"] for one in (plain, lossy, mixed, half)}) == 4
    sent = [one["sent"]["Answer"] for one in (plain, half, mixed, lossy)]
    # The last count may miss the last answers.
    share = [one["packed"] / one["bytes"] for one in sent]
    assert share[0] == 1
    assert share[1] < 0.7
    assert share[3] < share[2] < 1
    assert share[3] < 0.5
    assert mixed["config"]["wire"]["encoders"] == {f"table{n}": "huffman" for n in range(1, 5)}


def test_what_resumes_has_the_digest_and_the_choice_of_the_whole_job(tmp_path: Path) -> None:
    saves = (f"checkpoint.path={tmp_path}/saves", "checkpoint.every_steps=20", "trainers=2")
    first = JobRun(tiny(*LOSSY, *saves, "steps=40")).run()
    assert first["digest"] != lossy_digest()
    given, notes = load_saved([f"checkpoint.path={tmp_path}/saves", "steps=60"])
    again = JobRun(given, start=find_start(given, resume=True)).run()
    assert (again["resumed_from"], again["digest"]) == (40, lossy_digest())
    assert again["config"]["wire"]["encoders"] == first["config"]["wire"]["encoders"]
    assert notes


def test_an_exact_job_may_go_on_lossy_and_a_lossy_one_exactly(tmp_path: Path) -> None:
    saves = (f"checkpoint.path={tmp_path}/saves", "checkpoint.every_steps=10", "trainers=1")
    JobRun(tiny(*saves, "steps=10")).run()
    for steps, now in ((20, LOSSY), (30, ("wire.lookups=exact",))):
        given = tiny(*now, *saves, f"steps={steps}")
        start = find_start(given, resume=True)
        assert any(note.startswith("wire.lookups was ") for note in start.notes)
        report = JobRun(given, start=start).run()
        assert (report["resumed_from"], report["failures"]) == (steps - 10, [])


def test_a_choice_by_rates_is_made_once_and_written_down(tmp_path: Path) -> None:
    """On a link of 1 Mbit everything pays; within one machine nothing does."""
    auto = ("wire.lookups=lossy", "trainers=1", "steps=20")
    saves = (f"checkpoint.path={tmp_path}/saves", "wire.bandwidth=1Mbit")
    lines: list[str] = []
    job = JobRun(tiny(*auto, *saves), observe=lambda line, _: lines.append(line))
    chosen = job.run()["config"]["wire"]["encoders"]
    assert len(chosen) == 6
    assert "exact" not in chosen.values()
    assert any(line.startswith("lookups: ") and "1Mbit, which was given" in line for line in lines)
    given = tiny(*auto, *saves, "steps=30")
    again = JobRun(given, start=find_start(given, resume=True))
    assert again.config.wire.encoders == chosen
    otherwise = tiny(*auto, saves[0], "wire.bandwidth=1000kbit/s", "steps=30")
    again = JobRun(otherwise, start=find_start(otherwise, resume=True))
    assert "as it was written down" in again.lookups, "the same rate, said in other words"
    assert again.lookups.endswith("as it was written down")
    alone = JobRun(tiny(*auto))
    assert set((alone.config.wire.encoders or {}).values()) <= {"exact", "none"}
    assert alone.config.wire.bandwidth.endswith("Gbit")
    exact = JobRun(tiny(*auto, "wire.bandwidth=900Tbit"))
    assert set((exact.config.wire.encoders or {}).values()) == {"exact"}
    assert "all rows travel exactly, for nothing pays" in exact.lookups


def test_a_network_that_cannot_be_measured_has_to_be_named() -> None:
    away = ("wire.lookups=lossy", "cluster.transport=tcp", "cluster.host=10.0.0.1")
    with pytest.raises(ConfigError, match=r"wire\.bandwidth: expected a rate, such as 1Gbit"):
        settle_lookups(tiny(*away))
    with pytest.raises(ConfigError, match=r"wire\.bandwidth: expected a rate, such as 1Gbit"):
        settle_lookups(tiny("wire.lookups=lossy"), many_machines=True)
    for enough in ("wire.encoder=none", "wire.bandwidth=10Mbit"):
        config, line = settle_lookups(tiny(*away, enough))
        assert len(config.wire.encoders or {}) == 6
        assert line.startswith("lookups: ")


def test_a_table_that_does_not_exist_is_refused_by_its_name() -> None:
    for wrong in ("wire.tables={clicks: exact}", "wire.encoders={clicks: none}"):
        with pytest.raises(ConfigError, match=r"wire\.\w+\.clicks: this job has no such table"):
            JobRun(tiny(*LOSSY, wrong))


def test_rows_that_are_no_numbers_end_the_job_with_the_name_of_their_table() -> None:
    wild = ("optimizer.name=sgd", "optimizer.lr=1e38")
    with pytest.raises(ClusterError, match=r"^table 'table\d' has a NaN or an infinity in its row"):
        JobRun(tiny(*LOSSY, *wild)).run()


def test_a_users_loop_ends_with_the_digest_of_the_lossy_job() -> None:
    loop = ("loop.py", "two_epochs")
    sets = (*LOSSY[:3], "trainers=1", "servers=3")

    def run(*plan: Blow) -> ScriptRun:
        return ScriptRun(*loop, sets=sets, plan=plan)

    struck, calm = run(Blow(4, ("server:1",)), Blow(9, ("trainer:0",))), run()
    assert struck.wrong == calm.wrong == ""
    assert struck.digest == calm.digest != undisturbed_script(*loop, trainers=1)


def test_servers_that_come_and_go_change_no_bit() -> None:
    run = ScaledRun(tiny(*LOSSY, "trainers=2", "servers=4"), [Move(10, 5), Move(30, 4)])
    assert (run.states, run.digest) == (["done", "done"], lossy_digest())


def test_wire_keys_are_checked_at_the_door() -> None:
    for wrong in ("wire.lookups=int8", "wire.bandwidth=fast", "wire.bounds=[0.1, 0.2]"):
        with pytest.raises(ConfigError, match=r"wire\.\w+: expected"):
            Config.load(None, [wrong])
