"""What a comparison makes of runs: hours, intervals, tables, a page; and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from planaria.cli import app
from planaria.comparing import CONTENDERS, Comparison, Emulation, Outcome, compare
from planaria.comparing.accounts import (
    NO_PROTECTION,
    Interval95,
    Protection,
    account_of,
    pause_hours,
    repairs_of,
    saves_of,
)
from planaria.comparing.emulation import failure_steps
from planaria.comparing.page import as_page
from planaria.comparing.pictures import (
    as_csv,
    cost_cells,
    memory_cells,
    overhead_png,
    quality_png,
    sentences,
    show,
)
from planaria.config import Config
from planaria.errors import ClusterError, ConfigError
from planaria.planning.machine import Machine, Origin
from planaria.schedule import Fault

NAMES = list(CONTENDERS)
FREE = Protection(NO_PROTECTION, Interval95(0.0, None))
ORIGIN = Origin("planaria compare --seeds 3", "2026-01-02 03:04 UTC", Machine(2, 2**33, "a CPU"))
JOB = Config.load(None, ["steps=400", "servers=6"])


def report(**changes: Any) -> dict[str, Any]:
    """Of a run that nothing happened to."""
    nothing = {
        "digest": "0" * 32,
        "auc": 0.75,
        "normalized_entropy": 0.9,
        "pls": 0.0,
        "bytes_records": 1000,
        "failures": [],
        "rollbacks": [],
        "checkpoints": [],
        "samples_per_s": 100.0,
        "steps": 400,
    }
    return {**nothing, **changes}


def failure(step: int, gap_ms: float | None = 100.0) -> dict[str, Any]:
    return {"step": step, "gap_ms": gap_ms}


def whole_save(step: int) -> dict[str, Any]:
    return {"step": step, "seconds": 0.1, "bytes": 1010}


# ------------------------------------------------------------------------ the account of a run


def test_a_run_without_failures_and_saves_costs_nothing() -> None:
    for contender in CONTENDERS.values():
        assert account_of(Emulation(), contender, 0.125, report(), FREE).total == 0


def test_full_recovery_pays_saves_repairs_and_work_done_twice() -> None:
    facts = report(
        checkpoints=[whole_save(10), whole_save(20), whole_save(30)],
        failures=[failure(15), failure(25)],
        rollbacks=[{"from_step": 16, "to_step": 10}, {"from_step": 25, "to_step": 20}],
    )
    emulation = Emulation(save_min=6, load_min=3, reschedule_min=12)
    account = account_of(emulation, CONTENDERS["checkpoint"], 0.5, facts, FREE)
    assert astuple(account) == pytest.approx((0.3, 0.1, 11 * 0.5, 0.4, 0.0))
    assert account.total == pytest.approx(0.3 + 0.1 + 5.5 + 0.4)


def test_partial_recovery_does_no_work_twice() -> None:
    facts = report(failures=[failure(15), failure(25)], checkpoints=[whole_save(20)], pls=0.1)
    account = account_of(Emulation(), CONTENDERS["cpr-vanilla"], 0.125, facts, FREE)
    assert account.lost_work == account.protection == 0
    assert account.load + account.reschedule == pytest.approx(2 * 5.4 / 60)


def test_erasure_pays_its_pause_in_real_time_and_loads_only_what_parity_did_not_bear() -> None:
    four = Protection("given", Interval95(0.04, None))
    borne = report(failures=[failure(15, 1800.0), failure(25, 1800.0)])
    account = account_of(Emulation(), CONTENDERS["erasure"], 0.125, borne, four)
    assert account.load == account.reschedule == account.save == 0
    assert account.lost_work == pytest.approx(3.6 / 3600)
    assert account.protection == pytest.approx(0.04 * 50)
    beyond = {**borne, "rollbacks": [{"from_step": 26, "to_step": 20}]}
    account = account_of(Emulation(), CONTENDERS["erasure"], 0.125, beyond, four)
    assert account.load == pytest.approx(0.4 / 60)
    assert account.reschedule == pytest.approx(5 / 60)
    assert account.lost_work == pytest.approx(6 * 0.125 + 3.6 / 3600)


def test_servers_that_go_at_one_step_are_one_failure() -> None:
    facts = report(failures=[failure(15, 40.0), failure(15, 90.0), failure(25, None)])
    assert repairs_of(CONTENDERS["cpr-mfu"], facts) == 2
    assert pause_hours(CONTENDERS["erasure"], facts) == pytest.approx(0.09 / 3600)
    assert pause_hours(CONTENDERS["cpr-mfu"], facts) == 0


def test_a_save_of_an_eighth_of_the_rows_costs_an_eighth() -> None:
    eighth = {"step": 5, "seconds": 0.1, "bytes": 125}
    failed = {"step": 6, "failed": "server:1 ended before it was saved"}
    assert saves_of(report(checkpoints=[eighth])) == pytest.approx(0.125)
    assert saves_of(report(checkpoints=[whole_save(1), failed])) == 2
    assert saves_of(report(checkpoints=[eighth], bytes_records=0)) == 1


# ------------------------------------------------------------------------ the emulated job


def test_the_papers_example_gives_the_papers_intervals_and_overheads() -> None:
    """T_fail = 28 h, 8 servers, PLS 0.1: full 8.5 %, saving every 2.3 h; partial 0.53 %, 45 h."""
    job = Config.load(None, ["steps=28000", "servers=8"])
    emulation = Emulation(hours=2800, failures=100, load_min=0.4, reschedule_min=5.0).check(job)
    for name, every, overhead in (("checkpoint", 2.3, 0.085), ("cpr-vanilla", 44.8, 0.0053)):
        assert emulation.every_steps(name, job) * 0.1 == pytest.approx(every, abs=0.05)
        assert emulation.formula(name, job) == pytest.approx(overhead, rel=0.01)
    assert emulation.formula("erasure", job) is None
    assert emulation.every_steps("none", job) == 0
    assert emulation.every_steps("erasure", job) == 240


def test_a_failure_of_several_servers_makes_partial_recovery_save_more_often() -> None:
    one, two = (Emulation(lost=lost).every_steps("cpr-vanilla", JOB) for lost in (1, 2))
    assert (one, two) == (96, 48)
    assert Emulation(mtbf_hours=1e6).every_steps("cpr-vanilla", JOB) == 400  # once, at the end


@pytest.mark.parametrize("steps", [60, 61, 400, 100_000])
@pytest.mark.parametrize("seed", range(20))
def test_failures_lie_within_the_job_and_apart(steps: int, seed: int) -> None:
    for failures in (1, 2, 5):
        found = failure_steps(steps, failures, seed)
        assert found == failure_steps(steps, failures, seed)
        free = steps // (4 * (failures + 1))
        assert len(found) == failures
        assert np.diff([0, *found]).min() >= free >= 2
        assert found[-1] <= steps - steps // 10


def test_every_strategy_meets_the_same_kills() -> None:
    emulation = Emulation(lost=2)
    kills = emulation.schedule(JOB, seed=3)
    assert len(kills) == 10
    assert kills == emulation.schedule(JOB, seed=3)
    assert kills != emulation.schedule(JOB, seed=4)


def test_a_strategy_is_the_job_with_nothing_else_changed() -> None:
    job = Config.load(
        None,
        [
            "checkpoint.path=mine",
            "checkpoint.every_s=9",
            "checkpoint.bits=8",
            "cpr.rho=0.5",
            "failures.mtbf_s=5",
            "k=3",
        ],
    )
    for name in NAMES:
        config = Emulation(lost=2).config(name, job, 7, "saves")
        assert (config.strategy, config.r) == (
            CONTENDERS[name].strategy.name,
            CONTENDERS[name].parity,
        )
        assert (config.seed, config.spares, config.k) == (7, 2, 3)
        assert config.checkpoint.path == (None if name == "none" else "saves")
        assert config.checkpoint.bits == (32 if name == "none" else 8)
        assert (config.checkpoint.mode == "sync") == (name != "none")
        assert (config.cpr.variant, config.cpr.rho) == (CONTENDERS[name].variant, 0.5)
        assert config.failures.mtbf_s is None
        assert (config.model, config.data, config.optimizer) == (job.model, job.data, job.optimizer)


# ------------------------------------------------------------------------ a whole comparison


def fake(title: str, config: Config, schedule: Sequence[Fault]) -> Outcome:
    """What runs would say: partial recovery loses samples, `none` is lost."""
    step_s = 0.012 + config.seed / 10_000 if config.r else 0.01
    failures = [failure(event.step) for event in schedule]
    if not schedule:
        return Outcome(config.seed, report(auc=0.75 + config.seed / 1000), step_s)
    if config.strategy == "none":
        return Outcome(config.seed, report(failed="<gone>", steps=12), step_s, lost=True)
    facts = report(failures=failures, auc=0.75 + config.seed / 1000)
    if config.strategy == "cpr":
        facts |= {"digest": "f" * 32, "pls": 0.05, "auc": 0.74 + config.seed**2 / 1000}
    killed = [{"server": 0, "due_step": event.step, "step": event.step} for event in schedule]
    return Outcome(config.seed, facts, step_s, tuple(killed))


def compared(names: Sequence[str], **options: Any) -> Comparison:
    return compare(Emulation(**options), JOB, names, fake)


def test_runs_are_numbered_and_each_has_a_folder_of_its_own() -> None:
    titles, folders = [], []

    def run(title: str, config: Config, schedule: Sequence[Fault]) -> Outcome:
        titles.append(title)
        folders.append(config.checkpoint.path)
        return fake(title, config, schedule)

    compare(Emulation(seeds=2), JOB, ["erasure", "checkpoint"], run)
    assert titles[0] == "1 of 6: undisturbed, seed 0"
    # There and back, so that what drifts does not always fall to the same.
    assert titles[3] == "4 of 6: checkpoint, seed 1"
    assert titles[-1] == "6 of 6: undisturbed, seed 1"
    assert folders[0] is None
    assert len(set(folders)) == 5


def test_without_an_undisturbed_run_there_is_nothing_to_compare_with() -> None:
    def run(title: str, config: Config, schedule: Sequence[Fault]) -> Outcome:
        return Outcome(config.seed, report(failed="no room"))

    with pytest.raises(ClusterError, match="did not reach its end: no room"):
        compare(Emulation(), JOB, ["erasure"], run)


def test_tables_bars_and_files_tell_the_same() -> None:
    found = compared(["none", "erasure", "cpr-vanilla"], seeds=3)
    none, erasure, cpr = found.rows
    assert none.account is None
    assert erasure.equal == 3
    assert cpr.equal == 0
    change = cpr.difference("auc")
    assert change is not None
    assert change.error is not None
    assert change.mean == pytest.approx(-0.01 + (0 + 0 + 2) / 3000)

    console = Console(width=80, record=True, file=io.StringIO())
    show(console, found)
    text = console.export_text()
    assert re.search(r"none +- +lost +-", text)
    assert re.search(r"erasure +24.00 +21.00 .* 21.00±2.48", text)  # protection: the mean of three
    assert re.search(r"\n +measured +\n", text)
    assert re.search(r"cpr-vanilla +12.00 .* 0.00 +1.68 *\n", text)
    assert (
        "protection is measured on this machine, whose cores all processes share: the mean of 3"
        in text
    )
    assert re.search(r"cpr-vanilla +5.00 +0.7417 -0.0093±0.0029 .*differs", text)
    assert "none lost at step 12, seed 2: <gone>" in text
    assert "▚" in text
    assert re.search(r"erasure +7.50 +5.55 +1.39 +0.57 +0.00", text)  # memory
    assert max(map(len, text.split("stand for")[0].splitlines()[:-1])) <= 80

    made = json.loads(json.dumps(found.to_dict()))
    by_name = {row["name"]: row for row in made["strategies"]}
    assert by_name["none"]["overhead_hours"] is None
    assert by_name["erasure"]["overhead_hours"]["protection"] == pytest.approx(10.5)
    assert by_name["erasure"]["protection"]["source"] == "measured"
    assert by_name["erasure"]["memory_bytes"]["parity"] > 0
    assert by_name["cpr-vanilla"]["outcomes"][0]["slowdown_measured"] == pytest.approx(0)
    assert len(made["undisturbed"]) == len(made["schedules"]) == 3

    lines = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert [line["strategy"] for line in lines] == ["none", "erasure", "cpr-vanilla"]
    assert lines[0]["overhead_hours"] == ""
    assert float(lines[1]["protection_hours"]) == pytest.approx(10.5)
    assert [line["protection_is"] for line in lines] == ["none", "measured", "none"]
    assert float(lines[1]["memory_bytes"]) > float(lines[0]["memory_bytes"])

    page = as_page(found, {"overhead": overhead_png(found), "AUC": quality_png(found)}, ORIGIN)
    assert "&lt;gone&gt;" in page
    assert page.count("data:image/png;base64,iVBORw0KGgo") == 2
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert "http" not in page
    assert "<td>cpr-vanilla</td>" in page
    for shown in (
        "planaria compare --seeds 3",
        "2026-01-02 03:04 UTC",
        "2 cores, 8.0 GiB",
        "a CPU",
    ):
        assert shown in page


def test_one_run_measures_no_protection_and_says_so() -> None:
    """Two runs of one seed gave 0.00 % and 39.57 %."""
    found = compared(["erasure", "checkpoint"])
    (erasure, checkpoint) = cost_cells(found).lines
    assert erasure[2].startswith(">")
    assert erasure[-2] == "not\nmeasured"
    assert checkpoint[-2] == "0.00"
    (told,) = [sentence for sentence in sentences(found) if "protection" in sentence]
    assert told.startswith("erasure: the overhead is without protection, which one run cannot")
    made = found.to_dict()["strategies"][0]
    assert "protection" not in made["overhead_hours"]
    assert made["protection"] == {"source": "not measured", "share": None}


def test_what_the_runs_do_not_tell_from_noise_is_in_no_overhead() -> None:
    def run(title: str, config: Config, schedule: Sequence[Fault]) -> Outcome:
        found = fake(title, config, schedule)
        return replace(found, step_s=0.01 * (1 + config.seed)) if config.r else found

    found = compare(Emulation(seeds=2), JOB, ["erasure"], run)
    (line,) = cost_cells(found).lines
    assert (line[2], line[-2]) == (">0.00", "50.00±635.30\nnoise")
    assert any("do not tell from noise" in sentence for sentence in sentences(found))


def test_protection_that_is_given_is_called_so() -> None:
    given = compared(["erasure"], protection_percent=5.0)
    assert cost_cells(given).lines[0][-2] == "5.00\ngiven"
    assert not cost_cells(given).lines[0][2].startswith(">")


def test_the_memory_of_a_server_is_that_of_its_job() -> None:
    """6 servers hold 26 tables of 10,000 rows, each of 16 weights and as many words of state."""
    found = compared(["none", "erasure", "cpr-mfu", "cpr-scar"])
    none, erasure, mfu, scar = (row.memory for row in found.rows)
    assert none.records == pytest.approx(260_000 * 128 / 6)
    assert none.total == none.records + none.history
    assert erasure.parity == pytest.approx(none.records / 4)  # k = 4
    assert erasure.history == 2 * none.history == 2 * 2 * 26 * 256 * 128 / 6
    assert mfu.priorities == pytest.approx(260_000 / 6 * 5)
    assert scar.priorities == pytest.approx(260_000 / 6 * 65)
    assert memory_cells(found).lines[0][:2] == ("none", f"{none.total / 1e6:.2f}")


def test_a_folder_with_a_comparison_is_not_overwritten_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "planaria.comparing.command.run_here", lambda show, job, kills: fake("", job, kills)
    )
    monkeypatch.setattr("sys.argv", ["planaria", "compare", "--out", "a folder"])
    page = tmp_path / "index.html"
    page.write_text("of last week")
    options = ["compare", "--strategy", "erasure", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    assert "index.html exists; name another, or add --force" in " ".join(done.output.split())
    assert page.read_text() == "of last week"
    done = CliRunner().invoke(app, [*options, "--force"])
    assert done.exit_code == 0, done.output
    assert "<code>planaria compare --out &#x27;a folder&#x27;</code>" in page.read_text()
    made = json.loads((tmp_path / "report.json").read_text())["made"]
    assert made["machine"]["cores"] >= 1
    assert made["machine"]["cpu"]


def test_a_strategy_that_sometimes_stops_says_so_in_its_line() -> None:
    def run(title: str, config: Config, schedule: Sequence[Fault]) -> Outcome:
        if config.strategy == "erasure" and config.seed == 1:
            return Outcome(1, report(failed="too many", steps=9), lost=True)
        return fake(title, config, schedule)

    found = compare(Emulation(seeds=3), JOB, ["erasure"], run)
    assert cost_cells(found).lines[0][0] == "erasure 2/3"
    told = sentences(found)
    assert "erasure: 2 of 3 runs reached the end; its lines are their mean" in told
    assert "erasure lost at step 9, seed 1: too many" in told


def test_a_job_that_is_not_judged_has_tables_too() -> None:
    def run(title: str, config: Config, schedule: Sequence[Fault]) -> Outcome:
        facts = report(auc=None, normalized_entropy=None)
        return Outcome(config.seed, facts, None)

    found = compare(Emulation(), JOB, ["erasure", "none"], run)
    show(Console(file=io.StringIO()), found)
    assert quality_png(found).startswith(b"\x89PNG")
    assert overhead_png(found).startswith(b"\x89PNG")


# ------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--strategy", "magic"], "--strategy: expected one of none, erasure"),
        (["--failures", "0"], "--failures: expected a number from 1 to 1000, got 0"),
        (["--hours", "nan"], "--hours: expected a number above 0"),
        (["--load-min", "-1"], "--load-min: expected a number from 0"),
        (["--lost", "7"], "--lost: expected at most 6"),
        (["--seeds", "101"], "--seeds: expected a number from 1 to 100"),
        (["--set", "steps=59"], "steps: expected 60 or more for --failures 5, got 59"),
        (["--mtbf-hours", "0.01"], "because checkpoint saves every"),
        (["--set", "seed=18446744073709551615", "--seeds", "2"], "seed: expected room"),
        (
            ["--strategy", "erasure-2", "--set", "k=5"],
            "--strategy erasure-2: servers: expected 7 or more",
        ),
        (["--set", "optimizer.lrr=1"], "did you mean optimizer.lr?"),
        (["no-such-file.yaml"], "no-such-file.yaml"),
        (["--out", __file__], "--out: expected a folder"),
    ],
)
def test_a_wrong_option_gets_a_sentence_and_exit_code_2(options: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["compare", *options])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_saves_that_are_nearer_than_a_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps: expected 1158 or more"):
        Emulation(hours=500, mtbf_hours=1).every_steps("checkpoint", JOB.from_dict({"steps": 60}))
