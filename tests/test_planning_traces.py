"""Failure traces: what a file may hold, what is fitted to it, and what a replay keeps of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from planaria.errors import ConfigError
from planaria.planning import PlanInputs, Trace, analyse, make_plan, read_trace
from planaria.planning.failures import Renewal, Replay, exponential, fitted, with_mean
from planaria.planning.fits import digamma, fit_exponential, fit_gamma, fit_weibull

REAL = Path(__file__).parents[2] / "shared" / "data" / "failures" / "fault_trace.json"


@pytest.fixture
def real_trace() -> Trace:
    if not REAL.exists():
        pytest.skip("the public trace is not here: ../shared/data/failures/fault_trace.json")
    return read_trace(REAL)


def trace_of(gaps: np.ndarray[tuple[int], np.dtype[np.float64]], servers: int = 50) -> Trace:
    hours = np.cumsum(gaps)
    rng = np.random.default_rng(0)
    return Trace(hours - hours[0], rng.integers(servers, size=len(hours)))


# ------------------------------------------------------------------ fits


@pytest.mark.parametrize("x", [0.01, 0.3, 1.0, 2.5, 40.0])
def test_digamma_is_the_slope_of_lgamma(x: float) -> None:
    slope = (math.lgamma(x * (1 + 1e-6)) - math.lgamma(x * (1 - 1e-6))) / (2e-6 * x)
    assert digamma(x) == pytest.approx(slope, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("shape", [0.4, 0.75, 1.0, 3.0])
def test_fits_recover_what_was_planted(shape: float) -> None:
    rng = np.random.default_rng(5)
    weibull = fit_weibull(14.0 * rng.weibull(shape, 20_000))
    assert (weibull.shape, weibull.scale_hours) == pytest.approx((shape, 14.0), rel=0.05)
    gamma = fit_gamma(rng.gamma(shape, 14.0, 20_000))
    assert (gamma.shape, gamma.scale_hours) == pytest.approx((shape, 14.0), rel=0.05)
    assert gamma.mean_hours == pytest.approx(14.0 * shape, rel=0.05)


def test_the_likelihood_tells_the_families_apart() -> None:
    rng = np.random.default_rng(6)
    for family, gaps in (
        ("weibull", rng.weibull(0.5, 5000)),
        ("gamma", rng.gamma(0.4, 1.0, 5000)),
    ):
        fits = (fit_weibull(gaps), fit_gamma(gaps), fit_exponential(gaps))
        assert max(fits, key=lambda fit: fit.log_likelihood).family == family


# ------------------------------------------------------------------ bursts


@pytest.mark.parametrize("seed", range(5))
def test_exponential_failures_are_not_called_bursty(seed: int) -> None:
    found = analyse(trace_of(np.random.default_rng(seed).exponential(14.0, 600)))
    assert not found.is_bursty
    assert found.variation == pytest.approx(1, abs=0.2)
    assert "not bursty" in " ".join(found.sentences())


def test_uneven_gaps_and_simultaneous_failures_are_called_bursty() -> None:
    rng = np.random.default_rng(1)
    assert analyse(trace_of(10.0 * rng.weibull(0.6, 600))).is_bursty
    at_once = rng.exponential(14.0, 600)
    at_once[rng.random(600) < 0.15] = 0.0
    found = analyse(trace_of(at_once))
    assert found.is_bursty
    assert max(found.burst_sizes) >= 2
    assert sum(found.burst_sizes) == 600
    regular = analyse(trace_of(10.0 + rng.random(600)))  # control: far from exponential, no burst
    assert regular.exponential_p < 1e-6
    assert not regular.is_bursty


def test_one_single_burst_is_no_reason_to_fail() -> None:
    found = analyse(trace_of(np.full(20, 0.01)))
    assert found.burst_sizes == (20,)


# ------------------------------------------------------------------ failures to come


@pytest.mark.parametrize(
    "model",
    [
        exponential(3.0),
        Renewal(with_mean("weibull", 0.6, 3.0), (1, 1, 4)),
        Renewal(with_mean("gamma", 0.6, 3.0), (1, 5), least_gap_hours=0.2, kept=0.3),
        Replay(trace_of(np.random.default_rng(2).exponential(3.0, 100)), 60),
    ],
)
def test_more_hours_are_the_same_failures_and_later_ones(model: Renewal | Replay) -> None:
    short, long = (model.draw([1, 2], hours, 40) for hours in (200.0, 900.0))
    count = len(short.hours)
    assert 0 < count < len(long.hours)
    assert np.array_equal(long.hours[:count], short.hours)
    assert np.array_equal(long.places[:count], short.places)
    assert np.array_equal(long.luck[:count], short.luck)
    assert long.hours[count] >= 200
    assert np.all(np.diff(long.hours) >= 0)
    assert set(long.places.tolist()) <= set(range(40))
    other = model.draw([1, 3], 200.0, 40)
    assert not np.array_equal(other.hours, short.hours)


@pytest.mark.parametrize("servers", [20, 60, 150])
def test_a_replay_keeps_the_rate_per_server(servers: int) -> None:
    trace = trace_of(np.random.default_rng(3).exponential(2.0, 500), servers=60)
    drawn = [Replay(trace, 60).draw([seed], 2000.0, servers) for seed in range(20)]
    per_hour = np.mean([len(failures.hours) for failures in drawn]) / 2000
    assert per_hour == pytest.approx(servers / 60 / 2.0, rel=0.1)
    again = analyse(trace)
    for family in ("exponential", "weibull"):
        model = fitted(again, family, 60, servers)
        count = np.mean([len(model.draw([seed], 2000.0, servers).hours) for seed in range(20)])
        assert count / 2000 == pytest.approx(servers / 60 / 2.0, rel=0.15)


def test_a_replay_of_the_whole_trace_is_the_trace() -> None:
    trace = trace_of(np.random.default_rng(4).exponential(2.0, 300), servers=30)
    replay = Replay(trace, 30)
    drawn = replay.draw([0], replay.lap_hours, 30)
    assert len(drawn.hours) == 300
    gaps, true = (np.sort(np.diff(hours)) for hours in (drawn.hours, trace.hours))
    assert np.sum(np.isin(np.round(gaps, 9), np.round(true, 9))) >= 297


def test_the_real_trace_is_fitted_called_bursty_and_replayed(real_trace: Trace) -> None:
    found = analyse(real_trace)
    assert (found.failures, found.named_servers) == (584, 231)
    assert found.mtbf_hours == pytest.approx(14.2, abs=0.05)
    assert found.median_hours == pytest.approx(5.6, abs=0.05)
    assert found.is_bursty
    assert found.variation > 1.5
    assert found.near_share > 5 * found.near_share_if_exponential
    assert found.fit.shape < 0.9
    inputs = PlanInputs(servers=64, trace_servers=400, runs=100)
    plan = make_plan(inputs, real_trace)
    assert plan.mtbf_hours == pytest.approx(found.mtbf_hours * 400 / 64)
    assert "replayed" in plan.failures
    one = next(row for row in plan.estimates if row.name == "erasure r=1")
    assert one.whole.exceeded.mean > 20 * one.exceeded  # bursts, which the formula does not know
    assert plan.recommended is not None


# ------------------------------------------------------------------ files


def entries(**fields: object) -> list[dict[str, object]]:
    return [{"server": f"host{n % 7}", "time_hours": float(n), **fields} for n in range(12)]


def test_the_forms_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(entries()))
    by_hours = read_trace(path)
    assert by_hours.named_servers == 7
    assert by_hours.hours.tolist() == list(range(12))
    assert by_hours.mtbf_hours == 1
    table = tmp_path / "trace.csv"
    table.write_text("node,time\n" + "".join(f"n{n},2024-03-30T{n:02}:00:00\n" for n in range(12)))
    assert read_trace(table).hours == pytest.approx(by_hours.hours)
    days = [
        {"node_id": n % 7, "event_time": n / 24, "event_type": kind}
        for n in range(12)
        for kind in ("fault_start", "fault_end")
    ]
    path.write_text(json.dumps(days[::-1]))
    assert read_trace(path).hours == pytest.approx(by_hours.hours)


@pytest.mark.parametrize(
    ("header", "line", "understood"),
    [
        ("timestamp,hostname", "{epoch},n{n}", "timestamp is in seconds since 1970, hostname is"),
        ("time,host", "{epoch}.5,n{n}", "time is in seconds since 1970, host is the server"),
        ("Timestamp, Hostname", "{epoch}000,n{n}", "timestamp is in milliseconds since 1970"),
        ("timestamp,hostname", "2024-03-30 {n:02}:00:00,n{n}", "timestamp is a date and time"),
        ("time,server", "2024-03-30T{n:02}:00:00Z,n{n}", "time is a date and time, server is the"),
        ("time_seconds,node", "{seconds},n{n}", "time_seconds is in seconds, node is the server"),
    ],
)
def test_instants_of_logs_are_understood_and_it_is_said_how(
    tmp_path: Path, header: str, line: str, understood: str
) -> None:
    path = tmp_path / "trace.csv"
    lines = [line.format(epoch=1_711_800_000 + 3600 * n, seconds=3600 * n, n=n) for n in range(12)]
    path.write_text("\n".join([header, *lines]))
    trace = read_trace(path)
    assert trace.hours == pytest.approx(np.arange(12.0))
    assert trace.named_servers == 12
    assert f"trace.csv: {understood}" in trace.understood
    assert trace.understood in make_plan(PlanInputs(runs=2, trace_servers=12), trace).notes


def test_numbers_in_json_are_instants_as_well(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    failures = [{"hostname": f"h{n % 3}", "timestamp": 1.7e9 + 1800 * n} for n in range(12)]
    path.write_text(json.dumps(failures))
    assert read_trace(path).hours == pytest.approx(np.arange(12) / 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[{"server": 1, "time": 3.5}]', "other numbers go by their unit: time_hours"),
        ('[{"server": 1, "timestamp": true}]', "timestamp: expected a date and time"),
        ("[", "expected JSON"),
        ("{}", "expected a list"),
        ("[1, 2]", "entry 1: expected fields"),
        (json.dumps(entries()[:3]), "expected 10 failures or more, found 3"),
        (json.dumps(entries(server=None)), "expected the server that failed"),
        (json.dumps(entries(time_hours="noon")), "time_hours: expected a number, got 'noon'"),
        (json.dumps(entries(time_hours=1)), "all failures have the same"),
        ('[{"server": 1}]', "expected time_hours, time_days"),
        ('[{"server": 1, "time": "noon"}]', "expected a date and time"),
        ("[" * 100_000, "expected JSON"),
    ],
)
def test_a_wrong_file_gets_a_sentence(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"trace\.json") as raised:
        read_trace(path)
    assert says in str(raised.value)


def test_a_trace_of_more_servers_than_its_cluster_is_refused() -> None:
    trace = trace_of(np.random.default_rng(0).exponential(14.0, 100))
    with pytest.raises(ConfigError, match="--trace-servers"):
        make_plan(PlanInputs(trace_servers=3), trace)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(Path("no-such-trace.json"))
