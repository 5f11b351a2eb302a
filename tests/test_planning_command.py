"""`planaria plan`, from its options to its files; and what --measure makes of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from planaria.cli import app
from planaria.config import Config
from planaria.errors import ClusterError
from planaria.planning import PlanInputs
from planaria.planning.machine import Machine
from planaria.planning.measure import Measurement, disk_gb_per_s, measure, memory_gb_per_s
from planaria.schedule import Fault

FIXTURE = ["--servers", "8", "--mtbf-hours", "28", "--save-seconds", "336", "--load-seconds", "24"]


def plan(*options: str) -> Result:
    return CliRunner().invoke(app, ["plan", *options])


def test_a_plan_is_shown_and_written(tmp_path: Path) -> None:
    png, file = tmp_path / "plan.png", tmp_path / "plan.json"
    done = plan(*FIXTURE, "--runs", "50", "--png", str(png), "--json", str(file))
    assert done.exit_code == 0, done.output
    for shown in ("8.49", "4.40", "0.53", "recommended: erasure r=1", "instead of 1.", "█"):
        assert shown in done.output
    assert max(map(len, done.output.split("recommended")[0].splitlines()[2:])) <= 80
    assert png.read_bytes().startswith(b"\x89PNG")
    made = json.loads(file.read_text())
    assert made["recommended"] == "erasure r=1"
    by_name = {row["name"]: row for row in made["estimates"]}
    assert round(by_name["checkpoint"]["formula"], 3) == 0.085
    assert by_name["none"]["behaviour"]["interval"] is None


def test_a_plan_of_defaults_says_that_it_is_one(tmp_path: Path) -> None:
    """`planaria plan` alone planned for an invented cluster without a word."""
    shown = plan("--runs", "5").output.splitlines()
    assert shown[0].startswith("all defaults, not your cluster: --servers 8 --trainers 8 --hours ")
    assert "--model-gb 1000 " in shown[0]
    assert "--mtbf-hours 28" in shown[0]
    assert "1,000 GB of records (a save takes 250 s)" in shown[1]
    shown = plan("--runs", "5", "--servers", "4", "--model-gb", "2").output.splitlines()
    assert shown[0].startswith("defaults: --trainers 8 --hours 720 --touched-mb")
    assert "4 servers, 8 trainers, 2.00 GB of records (a save takes 1.00 s)" in shown[1]
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    _, assumed, *_ = plan(str(file), "--runs", "5").output.splitlines()
    assert assumed.startswith("defaults: --step-seconds 0.1 --network-gb-per-s 2.5 ")


JOB = """
servers: 5
trainers: 3
steps: 36000
parity: 2
model: {tables: 2, rows: [1000, 200000], dim: 8}
optimizer: {name: adam}
history: {steps: 4}
failures: {mtbf_s: 7200, save_s: 9, reschedule_s: 30}
checkpoint: {path: saves, every_s: 1800, keep_last: 5}
"""


def test_a_job_says_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    done = plan(str(file), "--runs", "5", "--mtbf-hours", "3", "--json", "-")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    expected = {
        "servers": 5,
        "trainers": 3,
        "hours": 1.0,  # of steps of 0.1 s
        "model_gb": 201_000 * 100 / 1e9,  # 25 words a record
        "touched_mb": 2 * 256 * 100 / 1e6,
        "optimizer": "adam",
        "dim": 8,
        "history_steps": 4,
        "save_seconds": 9.0,
        "restart_seconds": 30.0,
        "backup_hours": 0.5,
        "mtbf_hours": 3.0,  # what is given wins
        "lost_samples_percent": 0.0,
    }
    assert {name: made["inputs"][name] for name in expected} == expected
    assert "--servers 5" in made["notes"][0]
    assert "--mtbf-hours" not in made["notes"][0]
    assert "the job as it is has erasure r=2" in made["reasons"]
    file.write_text(JOB + "strategy: cpr\ncpr: {target_pls: 0.05}\n")
    made = json.loads(plan(str(file), "--runs", "5", "--json", "-").stdout)
    assert made["inputs"]["lost_samples_percent"] == 5


WRITTEN = {
    "none": ["--hours=0.1", "--mtbf-hours=1e6", "--restart-seconds=0", "--protection-percent=50"],
    "erasure": ["--protection-percent=0", "--loss-percent=100", "--memory-gb-per-s=0.0001"],
    "checkpoint": ["--protection-percent=90", "--memory-gb-per-s=0.00001", "--save-seconds=0.1"],
    "cpr": ["--lost-samples-percent=20", "--protection-percent=90", "--cpr-variant=mfu"],
}


@pytest.mark.parametrize("strategy", list(WRITTEN))
def test_the_recommended_strategy_is_written_as_a_job_that_trains(
    tmp_path: Path, strategy: str
) -> None:
    file, out, made = (tmp_path / name for name in ("job.yaml", "new.yaml", "plan.json"))
    file.write_text(JOB)
    options = [str(file), "--runs=5", f"--write={out}", f"--json={made}", *WRITTEN[strategy]]
    done = plan(*options)
    assert done.exit_code == 0, done.output
    assert f"planaria train {out}" in " ".join(done.output.split())
    job, before = Config.load(out), Config.load(file)
    assert job.strategy == strategy
    assert (job.model, job.optimizer, job.steps) == (before.model, before.optimizer, before.steps)
    assert job.checkpoint.path == "saves"
    chosen = json.loads(made.read_text())
    (best,) = [row for row in chosen["estimates"] if row["name"] == chosen["recommended"]]
    if strategy != "none":
        assert job.checkpoint.every_s == pytest.approx(3600 * best["behaviour"]["interval"], 1e-3)
        assert job.parity == best["behaviour"]["r"]
    if strategy == "cpr":
        assert (job.cpr.variant, round(job.cpr.target_pls, 6)) == ("mfu", 0.2)
    again = plan(*options)
    assert again.exit_code == 2
    assert "add --force to replace it" in " ".join(again.output.split())
    assert plan(*options, "--force").exit_code == 0


def test_a_job_can_be_written_without_one_and_is_not_where_nothing_fits(tmp_path: Path) -> None:
    out = tmp_path / "new.yaml"
    done = plan(*FIXTURE, "--runs", "50", "--write", str(out))
    assert done.exit_code == 0, done.output
    job = Config.load(out)
    assert (job.servers, job.strategy, job.parity) == (8, "erasure", 1)
    none = tmp_path / "none.yaml"
    done = plan(*FIXTURE, "--runs", "5", "--write", str(none), "--memory-budget-gb", "1")
    assert done.exit_code == 1
    assert not none.exists()


def test_the_mean_of_one_server_is_divided_by_the_servers(tmp_path: Path) -> None:
    """--mtbf-hours is of the whole job, which a user had taken for that of a server."""
    made = json.loads(
        plan("--servers=40", "--server-mtbf-hours=2000", "--runs=5", "--json=-").stdout
    )
    assert (made["mtbf_hours"], made["inputs"]["mtbf_hours"]) == (50, 50)
    file = tmp_path / "job.yaml"
    file.write_text(JOB)  # of 5 servers, with a mean of its own
    made = json.loads(plan(str(file), "--server-mtbf-hours=50", "--runs=5", "--json=-").stdout)
    assert made["mtbf_hours"] == 10
    assert "--mtbf-hours" not in made["notes"][0]


def test_noise_does_not_replace_the_strategy_of_a_job(tmp_path: Path) -> None:
    """It wrote `none` over erasure for an advantage that it said it could not tell from noise."""
    file, out = tmp_path / "job.yaml", tmp_path / "new.yaml"
    file.write_text(JOB)
    alike = [
        "--runs=5",
        "--protection-percent=0.001",
        "--slowdown-percent=0",
        "--restart-seconds=0",
    ]
    done = plan(str(file), *alike, f"--write={out}")
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "recommended: erasure r=2 erasure r=2 stays, for the job has it" in shown
    assert "points less, which the simulation cannot tell apart" in shown
    assert (Config.load(out).strategy, Config.load(out).parity) == ("erasure", 2)
    assert "stays" not in plan(*alike).output  # without a job there is nothing to keep


def test_a_trace_is_fitted_and_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"s{n % 5},{n // 3 * 40 + n % 3 * 0.01}" for n in range(60)]
    trace.write_text("\n".join(["server,time_hours", *lines]))
    done = plan("--trace", str(trace), "--runs", "20", "--json", "-")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert "replayed" in made["failures"]
    assert max(made["findings"]["burst_sizes"]) == 3
    done = plan("--trace", str(trace), "--runs", "20", "--failures", "gamma")
    assert "the trace is bursty" in done.output
    assert "gamma failures" in done.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--servers", "0"], "--servers: expected a number from 1 to 1024, as many as a job"),
        (["--servers", "2000"], "to 1024, as many as a job may have, got 2000"),
        (["--trainers", "2000"], "--trainers: expected a number from 1 to 1024"),
        (["--server-mtbf-hours", "0"], "expected a number from 0.008 to 1e+09, got 0"),
        (["--server-mtbf-hours", "9", "--mtbf-hours", "3"], "give one of the two"),
        (["--server-mtbf-hours", "9", "--trace", "t.csv"], "the trace says it"),
        (["--hours", "nan"], "--hours: expected"),
        (["--trace", "no-such.json"], "--trace no-such.json: cannot be read"),
        (["--failures", "sometimes"], "--failures: expected one of auto"),
        (["--png", "no-such-folder/plan.png"], "no-such-folder/plan.png: expected a file"),
        (["no-such.yaml"], "no-such.yaml"),
        (["--measure", "no-such.yaml"], "no-such.yaml"),
        (["--shape", "0.5"], "--shape: it is the shape of weibull or gamma failures"),
        (["--write", __file__], "exists; name another, or add --force"),
    ],
)
def test_a_wrong_option_gets_a_sentence_and_exit_code_2(options: list[str], says: str) -> None:
    done = plan(*options)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_trace_and_a_mean_are_one_too_many(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("server,time_hours\n" + "".join(f"s,{n}\n" for n in range(20)))
    done = plan("--trace", str(trace), "--mtbf-hours", "3")
    assert done.exit_code == 2
    assert "--mtbf-hours: the trace says it" in done.output


def report(samples_per_s: float | None, failures: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"samples_per_s": samples_per_s, "failures": list(failures)}


def test_measured_costs_are_inputs_of_a_plan(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []

    def run(config: Config, schedule: Sequence[Fault]) -> dict[str, Any]:
        ran.append((config.strategy, len(schedule)))
        if config.strategy == "none":
            return report(2560.0)
        if not schedule:
            return report(2000.0)
        killed = {
            "gap_ms": 250.0,
            "rebuilt_ms": 500.0,
            "bytes_rebuilt": 10**9,
            "samples_per_s_during": 1800.0,
        }
        return report(500.0, [killed])  # a rebuild is no cost of protection

    found = measure(40, 9, folder=tmp_path, run=run)
    assert ran == [("none", 0), ("erasure", 0), ("erasure", 1)]
    assert found.costs["step_seconds"] == pytest.approx(0.1)
    assert found.costs["protection_percent"] == pytest.approx(28)
    assert found.costs["pause_seconds"] == 0.25
    assert found.costs["rebuild_gb_per_s"] == pytest.approx(2)
    assert found.costs["slowdown_percent"] == pytest.approx(10)
    assert (found.job.servers, found.job.trainers) == (6, 2)
    PlanInputs(**found.costs).check()  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="too short"):
        measure(4, 1, folder=tmp_path, run=lambda config, schedule: report(None))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_what_its_costs_were_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores that all processes share were applied to 32 servers without a word."""
    here = Machine(2, 2**33, "a small CPU")
    short = Config.from_dict({"servers": 6, "trainers": 2, "spares": 1})
    costs = {"step_seconds": 0.2, "protection_percent": 30.0}

    def measured(*arguments: Any, **options: Any) -> Measurement:
        return Measurement(costs, short, here)

    monkeypatch.setattr("planaria.planning.command.measure_here", measured)
    done = plan("--measure", "--servers", "32", "--step-seconds", "0.1", "--runs", "5")
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "10 processes, 6 of them servers, shared 2 cores (a small CPU)" in shown
    assert "The plan has 32 servers and takes each for as fast as one of those" in shown
    assert "measured: --protection-percent 30 " in shown  # the step's time was given
    done = plan("--measure", "--runs", "5", "--json", "-")
    assert "shared 2 cores" in json.loads(done.stdout)["notes"][0]


def test_disk_and_memory_have_a_rate(tmp_path: Path) -> None:
    assert disk_gb_per_s(tmp_path, megabytes=2) > 0
    assert memory_gb_per_s(megabytes=2) > 0


def test_the_command_line_starts_without_pictures_and_statistics() -> None:
    code = "import sys, planaria.cli; print({'matplotlib', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
