"""The door: what is right comes through unchanged, what is wrong is refused with its name."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from any_config import DEFAULTS, configurations, flat, nested
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.config import KINDS, Config
from planaria.errors import ConfigError
from planaria.optimizers import Optimizer

FEWER = settings(max_examples=30, deadline=None)  # a busy machine is no failure
IN_TMP = settings(FEWER, suppress_health_check=[HealthCheck.function_scoped_fixture])


# ------------------------------------------------------------------------- what is right comes in


@FEWER
@given(configurations())
def test_a_right_configuration_comes_out_as_it_went_in(values: dict[str, object]) -> None:
    config = Config.from_dict(values)
    assert config.to_dict() == values
    assert set(flat(values)) == set(DEFAULTS) == set(KINDS)
    through_json = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert through_json == config
    assert through_json.fingerprint() == config.fingerprint()
    assert hash(through_json) == hash(config)


@IN_TMP
@given(values=configurations(), sort_keys=st.booleans())
def test_a_file_and_overrides_say_the_same(
    tmp_path: Path, values: dict[str, object], sort_keys: bool
) -> None:
    config = Config.from_dict(values)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=sort_keys))
    assert Config.load(file) == config
    overrides = [f"{path}={json.dumps(value)}" for path, value in flat(values).items()]
    assert Config.load(None, overrides) == config
    assert Config.load(file, overrides) == config


def test_nothing_given_is_the_default() -> None:
    empty_sections = dict.fromkeys(["optimizer", "model", "data"])
    assert Config.load() == Config.from_dict({}) == Config.from_dict(empty_sections) == Config()
    assert Config().optimizer_rule == Optimizer("adagrad", lr=0.02)
    assert Config().layout.k == 4
    assert len(Config().tables) == 26


def test_the_last_override_wins_and_nothing_is_null(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("k: 2\nsteps: 10\n")
    config = Config.load(file, ["k=", "steps=20", "steps=30", " model.bottom =[]"])
    assert (config.k, config.steps, config.model.bottom) == (None, 30, ())


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("2", 2.0), ("+.5E+1", 5.0), ("'3'", 3.0)]
)
def test_numbers_that_yaml_takes_for_words_are_numbers(text: str, value: float) -> None:
    lr = Config.load(None, [f"optimizer.lr={text}"]).optimizer.lr
    assert (lr, type(lr)) == (value, float)


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_on_and_off_are_words_here_although_yaml_takes_them_for_booleans(word: str) -> None:
    assert Config.load(None, [f"cluster.encryption={word}"]).cluster.encryption == word


def test_the_fingerprint_is_that_of_the_values_and_not_of_their_spelling(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optimizer: {lr: 1, weight_decay: -0.0}\nseed: 0x10")
    (tmp_path / "b.yaml").write_text("# other order\nseed: 16\noptimizer:\n  lr: 1.0")
    prints = {Config.load(tmp_path / name).fingerprint() for name in ("a.yaml", "b.yaml")}
    assert len(prints) == 1
    others = {Config.load(None, [f"seed={seed}"]).fingerprint() for seed in range(20)}
    assert len(others | prints) == 21
    canonical = json.dumps(Config().to_dict(), sort_keys=True, separators=(",", ":"))
    assert Config().fingerprint() == hashlib.sha256(canonical.encode()).hexdigest()


# ---------------------------------------------------------------------- what is wrong is refused

JUNK = [
    None, True, False, -1, 2**70, -0.5, 2.5, 1e39, math.nan, math.inf, -math.inf, "", "fast", "-1",
    "nan", "inf", "1_0", "٣", [], [0], ["x"], [[1]], [True], [1.0], {}, {"a": 1}, b"x", {1},
    datetime.date(2024, 1, 1), 10**400, object(),
]  # fmt: skip


def is_right(path: str, value: object) -> bool:
    """Said again, by the type of the default and the page: which junk is no junk for a key."""
    default = DEFAULTS[path]
    match path:
        case "k" | "scatter" | "tables" | "script.parameters" | "data.epochs" | "cluster.domains":
            return value is None
        case "wire.tables" | "wire.encoders":
            return value is None or value == {}
        case (
            "optimizer.eps"
            | "failures.mtbf_s"
            | "failures.save_s"
            | "failures.load_s"
            | "checkpoint.every_s"
        ):
            return value is None or (not isinstance(value, bool) and value in (2.5, 2**70))
        case "model.name":
            return isinstance(value, str) and value.isidentifier() and value.isascii()
        case "tier.ram":
            return value is None
        case "data.path" | "data.schema" | "checkpoint.path" | "tier.path":
            return value is None or (isinstance(value, str) and value != "")
        case "cluster.encryption" | "cluster.early_answers" | "script.resume" | "data.shuffle":
            return isinstance(value, bool)
        case "trainer.elastic" | "wire.packing":
            return isinstance(value, bool)
        case "reproducible":
            return value is False
        case "trainer.device":
            return False
        case "cluster.host":
            return isinstance(value, str) and value not in ("", "٣")
        case "model.bottom" | "model.top":
            return value == [] and isinstance(value, list)
    if isinstance(default, float) and not isinstance(value, bool):
        below_one = path in (
            "optimizer.momentum",
            "optimizer.beta1",
            "optimizer.beta2",
            "data.zipf",
            "data.validation",
            "cpr.target_pls",
            "cpr.rho",
            "cpr.large_share",
        )
        return value in (2.5, 2**70) and not below_one
    return False


@pytest.mark.parametrize("path", KINDS)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(path: str) -> None:
    for value in JUNK:
        if is_right(path, value):
            values = nested(path, value)
            if path == "checkpoint.every_s":
                values = {"checkpoint": {"path": "job", "every_s": value}}
            if path == "data.path" and value is not None:
                values = {"data": {"source": "criteo", "path": value}}
            if path == "tier.path" and value is not None:
                values = {"tier": {"ram": 10**9, "path": value}}
            if path == "data.schema" and value is not None:
                values = {"data": {"source": "files", "path": "clicks", "schema": value}}
            Config.from_dict(values)
            continue
        with pytest.raises(ConfigError) as caught:
            Config.from_dict(nested(path, value))
        assert re.fullmatch(rf"{re.escape(path)}(\.a)?: expected .+, got .+", str(caught.value)), (
            value
        )
        assert len(str(caught.value)) < 300


@FEWER
@given(configurations(), st.data())
def test_one_wrong_value_among_right_ones_is_found(
    values: dict[str, object], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted(KINDS)))
    junk = data.draw(st.sampled_from(JUNK).filter(lambda value: not is_right(path, value)))
    section, dot, name = path.partition(".")
    inner = values[section] if dot else values
    assert isinstance(inner, dict)
    inner[name or section] = junk
    with pytest.raises(ConfigError, match=rf"^{re.escape(path)}(\.a)?: expected"):
        Config.from_dict(values)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates()
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=6,
)


@FEWER
@given(st.dictionaries(st.sampled_from([*KINDS, *Config().to_dict()]) | scalars, anything))
def test_no_dictionary_raises_anything_else(values: dict[Any, object]) -> None:
    with suppress(ConfigError):
        Config.from_dict(values)


yaml_text = st.text() | st.text("abk:-[]{}!&*?|>'\"%@ \n\t01.e#,", max_size=40)


@IN_TMP
@given(text=yaml_text)
@pytest.mark.parametrize("path", ["", "steps", "model.rows", "data.path", "optimizer.lr"])
def test_no_text_raises_anything_else(tmp_path: Path, path: str, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(ConfigError):
        Config.load(*((None, [f"{path}={text}"]) if path else (file, [])))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimizer.lr=fast", "optimizer.lr: expected a number above 0, got 'fast'"),
        ("optimizer.lr=1e-50", "got '1e-50', which is 0.0 in float32"),
        ("optimizer.beta2=0.99999999999", "which is 1.0 in float32"),
        ("steps=400.0", "steps: expected a whole number from 1 to 1000000000, got 400.0"),
        ("parity=5", "parity: expected a whole number from 0 to 4, got 5"),
        ("steps=true", "got true"),
        ("batch=", "got null"),
        ("strategy=cpr", "failures.mtbf_s: expected a number, because strategy is cpr"),
        ("strategy=checkpoint", "checkpoint.every_steps: expected 1 or more, because strategy is"),
        ("strategy=hope", "strategy: expected erasure, checkpoint, cpr or none, got 'hope'"),
        ("optimizer.lrr=1", "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
        ("optimzer.lr=1", "did you mean optimizer.lr?"),
        ("histroy.steps=1", "did you mean history.steps?"),
        ("lr=1", "did you mean optimizer.lr?"),
        ("data.batch=1", "did you mean batch?"),
        ("zzz=1", "zzz: unknown key; known are strategy, servers, "),
        ("history.zzz=1", "history.zzz: unknown key; known are history.steps"),
        ("optimizer.lr.x=1", "unknown key"),
        ("optimizer=adam", "optimizer: a section, not a key; set one of optimizer.name, "),
        ("steps", "--set steps: expected path=value, as in --set steps=400"),
        ("steps=[1", "--set steps=[1, line 1, column 3: expected ',' or ']'"),
        ("steps=!!bool x", "put it in quotes"),
        ("steps=" + "9" * 5000, "put it in quotes"),
        ("steps=0x" + "f" * 5000, "got a number of thousands of digits"),
        ("steps=" + "[" * 1000, "put it in quotes"),
        ("servers=1", "servers: expected 2 or more, because parity is 1, got 1"),
        ("k=6", "servers: expected 7 or more, because k is 6 and parity is 1, got 6"),
        ("scatter=4", "scatter: expected 5 or more, because k is 4 and parity is 1, got 4"),
        ("batch=1", "batch: expected a sample for each trainer, 2 or more, got 1"),
        ("model.rows=[5, 6]", "model.rows: expected one number, or 26, as many as model.tables"),
        ("data.source=criteo", "data.path: expected the path of Criteo's file, got null"),
        (
            "data.path=x",
            "data.source: expected criteo or files, because data.path is x, got 'synthetic'",
        ),
        ("checkpoint.every_steps=5", "checkpoint.path: expected a folder or a URL, because"),
        ("checkpoint.every_s=auto", "because checkpoint.every_s is auto, got null"),
        ("checkpoint.every_s=often", "checkpoint.every_s: expected null or auto or a number above"),
        ("cluster.heartbeat_limit_ms=100", "more than cluster.heartbeat_ms, 200, got 100"),
        ("cluster.retry_ms=30000", "cluster.deadline_s: expected more than cluster.retry_ms"),
    ],
)
def test_a_refusal_says_what_to_do(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(None, [text])
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"steps: 3\nbatch: [1\n", r"job.yaml, line 3, column 1: "),
        (b"a: b: c", r"job.yaml, line 1, column 5: mapping values are not allowed"),
        (b"steps: 3\nseed: \x01", r"job.yaml, line 2, column 7: special characters"),
        (b"steps: 3\nsteps: 4", r"job.yaml, line 2, column 1: 'steps' stands here twice"),
        (b"model:\n  dim: 3\n  dim: 3", r"job.yaml, line 3, column 3: 'dim' stands here twice"),
        (b"steps: !!python/name:os.system", r"line 1, column 8: could not determine a constructor"),
        (b"steps: \xff", r"job.yaml: .* text in UTF-8"),
        (b"- steps", r"job.yaml: expected keys with values, got \['steps'\]"),
        (b"some text", r"job.yaml: expected keys with values, got 'some text'"),
        (b"model: 3", r"^model: expected keys with values, got 3"),
        (b"model.dim: 3", r"^model.dim: expected dim below model:, not with a dot"),
        (b"on: 3", r"^true: unknown key"),
        (b"x: &x [*x, *x]\nseed: *x", r"unknown key"),
        (b"seed: &x [*x, *x]", r"^seed: expected"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: bytes, says: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=says):
        Config.load(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match="check the path"):
            Config.load(path)


def test_the_data_must_be_there_where_the_job_starts_and_only_there(tmp_path: Path) -> None:
    data = tmp_path / "day_0"
    overrides = ["data.source=criteo", f"data.path={data}"]
    with pytest.raises(ConfigError, match=r"data.path: expected a file, .*day_0"):
        Config.load(None, overrides)
    data.write_text("")
    config = Config.load(None, overrides)
    data.unlink()
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(
        ConfigError, match=r"model.tables: expected 26, as Criteo's data has, got 3"
    ):
        Config.load(None, [*overrides, "model.tables=3"])


# ---------------------------------------------------------------------------- what follows from it


def test_without_a_strategy_there_is_no_parity_whatever_is_said() -> None:
    config = Config.load(None, ["strategy=none", "servers=2", "parity=4", "k=64", "trainers=1"])
    assert (config.layout.k, config.layout.r, config.r) == (1, 0, 0)


def test_tables_have_the_rows_that_are_given() -> None:
    config = Config.load(None, ["model.tables=3", "model.rows=[5, 6, 7]", "model.dim=4"])
    assert [(t.name, t.rows, t.dim) for t in config.tables] == [
        ("table0", 5, 4), ("table1", 6, 4), ("table2", 7, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given_eps", "name", "eps"), [("", "adam", 1e-8), ("", "sgd", 1e-10), ("0.5", "adam", 0.5)]
)
def test_eps_follows_the_optimizer_unless_given(given_eps: str, name: str, eps: float) -> None:
    config = Config.load(None, [f"optimizer.eps={given_eps}", f"optimizer.name={name}"])
    assert config.optimizer_rule.eps == eps


@FEWER
@given(configurations(), st.integers(1, 10**9))
def test_every_step_of_every_job_has_a_learning_rate(values: dict[str, object], step: int) -> None:
    config = Config.from_dict(values)
    rate = config.lr(min(step, config.steps))
    assert 0 <= rate <= config.optimizer.lr
    assert rate > 0 or config.optimizer.schedule == "linear"


def test_a_server_that_reads_its_configuration_does_not_import_torch() -> None:
    code = "import sys, planaria.config, planaria.schedule; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
