"""`planaria compress`: what it says of a checkpoint's rows is what becomes of these rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from checkpoint_jobs import Model, small_chunks
from typer.testing import CliRunner, Result

from planaria import Initial, Layout, Table, kernels
from planaria.checkpoints import Checkpoint, Facts, publish
from planaria.cli import app
from planaria.cluster.files import Beginning, JobFiles
from planaria.compressing.measuring import CLASSES, measure
from planaria.compressing.recommending import recommend
from planaria.compressing.sampling import Sample, take_samples
from planaria.config import Config
from planaria.errors import ArgumentError
from planaria.kernels import lossy
from planaria.kernels.types import Index
from planaria.wire.measuring import candidates

pytestmark = pytest.mark.usefixtures("small_chunks")
__all__ = ["small_chunks"]

LAYOUT = Layout.fresh(5, 1, 3)
CONFIG = Config.load(overrides=["model.tables=3", "model.rows=70", "model.dim=4"])


def untrained(tables: Sequence[Table]) -> Model:
    """As a job with seed 0 begins."""
    model = Model(0, tables, CONFIG.optimizer_rule)
    for arena, rows in zip(model.arenas, model.rows, strict=True):
        state = arena.optimizer.initial_state(arena.dim)
        kernels.init_records(0, arena.init, arena.rows, np.arange(arena.rows), state, rows)
    return model


def trained(model: Model) -> list[Index]:
    """Changes every third row, each to what no other is."""
    changed = [np.arange(0, len(rows), 3) for rows in model.rows]
    for rows, some in zip(model.rows, changed, strict=True):
        weights = np.random.default_rng(1).standard_normal((len(some), rows.shape[1]))
        rows[some] = weights.astype(np.float32).view(np.uint32)
    return changed


def saved(folder: Path) -> Model:
    """Step 8, and step 9, which has what changed since."""
    model = untrained(CONFIG.tables)
    changed = None
    for step, base in ((8, ()), (9, (8,))):
        parts = [model.save_part(folder, step, LAYOUT, p, changed) for p in LAYOUT.places]
        config = CONFIG.to_dict()
        facts = Facts(CONFIG.tables, CONFIG.optimizer_rule, LAYOUT, base=base, config=config)
        publish(folder, step, parts, facts)
        if changed is None:
            changed = trained(model)
    return model


def compress(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compress", *arguments])


# ---------------------------------------------------------------- which rows


def test_a_sample_is_the_tables_own_rows_as_of_the_step(tmp_path: Path) -> None:
    model = saved(tmp_path)
    samples = take_samples(Checkpoint(tmp_path, 9), 70)
    assert [sample.table for sample in samples] == [table.name for table in CONFIG.tables]
    for number, sample in enumerate(samples):
        expected = model.rows[0][number * 70 : (number + 1) * 70, :4].view(np.float32)
        assert sample.weights.shape == (70, 4)
        order = np.lexsort(sample.weights.T), np.lexsort(expected.T)
        np.testing.assert_array_equal(sample.weights[order[0]], expected[order[1]])
        assert sample.trained in (23, 24)


def test_rows_that_training_has_changed_come_first_and_the_same_are_taken_again(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    assert [sample.trained for sample in take_samples(Checkpoint(tmp_path, 8), 5)] == [0, 0, 0]
    first = take_samples(Checkpoint(tmp_path, 9), 5)
    again = take_samples(Checkpoint(tmp_path, 9), 5)
    for one, other in zip(first, again, strict=True):
        assert len(one.weights) == one.trained == 5
        np.testing.assert_array_equal(one.weights, other.weights)


# ---------------------------------------------------------------- what is said of them


def normal_rows(table: str = "t", rows: int = 300, scale: float = 1.0) -> Sample:
    weights = scale * np.random.default_rng(3).standard_normal((rows, 8))
    return Sample(table, 10**6, weights.astype(np.float32), rows)


def test_no_error_is_beyond_its_bound_and_none_is_made_up() -> None:
    report = measure(7, [normal_rows(), normal_rows("u", 1, 1e-40)])
    for line in report.lines:
        if line.bound_class in CLASSES:
            assert list(line.measured) == candidates()
            assert line.mean_error <= line.largest_error <= line.bound
    by_class = {line.bound_class: line for line in report.lines if line.table == "t"}
    assert by_class["tight"].largest_error > 0.5 * by_class["tight"].bound  # control
    assert by_class["loose"].bound == pytest.approx(5 * by_class["tight"].bound)
    assert by_class["fp16"].measured["fp16"].ratio == pytest.approx(2, rel=0.01)


def test_a_ratio_is_that_of_a_frame() -> None:
    sample = normal_rows(rows=2000)
    report = measure(7, [sample])
    line = next(line for line in report.lines if line.bound_class == "base")
    tables = np.zeros(len(sample.weights), np.int32)
    frame = lossy.encode(sample.weights, tables, np.array([line.bound], np.float32), ["huffman"])
    size = sample.weights.nbytes / line.measured["huffman"].ratio
    assert 0 <= len(frame) - size <= 32
    assert report.ratio("base", "huffman") == line.measured["huffman"].ratio


def test_a_table_whose_weights_are_all_equal_has_no_error() -> None:
    flat = Sample("flat", 9, np.full((9, 4), 0.5, np.float32), 0)
    report = measure(7, [flat])
    assert {line.largest_error for line in report.lines} == {0.0}
    assert [one.encoder for one in recommend(report, 1e6).choices] == ["exact"]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_number_that_is_none_is_told_with_its_table(wrong: float) -> None:
    sample = normal_rows("ads")
    sample.weights[3, 2] = wrong
    with pytest.raises(ArgumentError, match="table 'ads' has a NaN or an infinity"):
        measure(7, [sample])


def test_what_is_recommended_is_taken_by_a_job() -> None:
    samples = [normal_rows(table.name, rows=2000) for table in CONFIG.tables]
    found = recommend(measure(7, samples), 1e7)
    config = Config.from_dict({**CONFIG.to_dict(), **found.settings()})
    encoders = {one.table: one.encoder for one in found.choices}
    assert {name: config.wire.encoder_of(name) for name in encoders} == encoders
    assert "exact" not in encoders.values()


def test_the_slower_the_link_the_more_is_encoded() -> None:
    report = measure(7, [normal_rows(rows=2000)])
    slow, fast = recommend(report, 1e7).choices[0], recommend(report, 1e13).choices[0]
    assert slow.encoder != "exact"
    assert slow.gain > 3
    assert (fast.encoder, fast.gain) == ("exact", 1.0)


# ---------------------------------------------------------------- the command


def test_a_picture_needs_no_package_of_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [name for name in candidates() if name not in ("zstd", "lz4")]
    for module in ("measuring", "pictures"):
        name = f"planaria.compressing.{module}.candidates"
        monkeypatch.setattr(name, lambda: few, raising=False)
    saved(tmp_path / "ck")
    done = compress(str(tmp_path / "ck"), "--rows", "40", "--png", str(tmp_path / "c.png"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_is_shown_drawn_and_written(tmp_path: Path) -> None:
    saved(tmp_path / "ck")
    png, file = tmp_path / "c.png", tmp_path / "c.json"
    files = ["--png", str(png), "--json", str(file)]
    done = compress(str(tmp_path / "ck"), "--rows", "40", "--bandwidth", "100Mbit", *files)
    assert done.exit_code == 0, done.output
    assert "step 9; ratio" in done.output
    assert "\nwire:\n  lookups: lossy\n  bandwidth: 100Mbit\n" in done.output
    assert max(map(len, done.output.split("step 9")[0].splitlines())) <= 80
    assert png.read_bytes().startswith(b"\x89PNG")
    made = json.loads(file.read_text())
    assert [table["sampled"] for table in made["tables"]] == [40, 40, 40]
    assert len(made["lines"]) == 3 * (2 + len(CLASSES))
    assert made["recommendation"]["bits_per_s"] == 1e8
    assert len(made["recommendation"]["choices"]) == 3
    done = compress(str(tmp_path / "ck"), "--step", "8", "--json", "-")
    assert json.loads(done.stdout)["step"] == 8


def job_folder(folder: Path, *sets: str) -> Path:
    (folder / "0101-000000-abcdef").mkdir(parents=True)
    files = JobFiles(folder / "0101-000000-abcdef")
    files.create(Config.load(overrides=sets), Beginning("job"))
    return files.folder


def test_of_a_job_its_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    saved(tmp_path / "ck")
    folder = job_folder(tmp_path, f"checkpoint.path={tmp_path / 'ck'}")
    done = compress(str(folder), "--json", "-")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step"] == 9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nobody"], "'nobody' is neither a folder of checkpoints nor one running job"),
        ([""], "CHECKPOINT|JOB is empty"),
        (["{ck}", "--step", "3"], "has no checkpoint of step 3; it has 8, 9"),
        (["{ck}", "--bandwidth", "fast"], "--bandwidth: expected a rate in bits"),
        (["{ck}", "--png", "no/such/folder.png"], "expected a file in a folder"),
        (["{unsaved}"], "saves nothing, and only a checkpoint has rows to look at: start it with"),
        (["{early}"], "which is not a folder here yet: ask when it has saved"),
    ],
)
def test_what_cannot_be_shown_is_told(tmp_path: Path, arguments: list[str], says: str) -> None:
    saved(tmp_path / "ck")
    places = {
        "ck": tmp_path / "ck",
        "unsaved": job_folder(tmp_path / "unsaved"),
        "early": job_folder(tmp_path / "early", f"checkpoint.path={tmp_path / 'none'}"),
    }
    done = compress(*(one.format(**places) for one in arguments))
    assert done.exit_code == 2
    assert says in done.output


def test_rows_of_a_damaged_checkpoint_are_not_shown(tmp_path: Path) -> None:
    saved(tmp_path)
    for part in tmp_path.glob("step-00000008/*"):
        if part.suffix != ".json":
            content = bytearray(part.read_bytes())
            content[len(content) // 2] ^= 1
            part.write_bytes(content)
    done = compress(str(tmp_path))
    assert done.exit_code == 1
    assert "an earlier one can be named with --step" in done.output


def test_tables_of_several_dimensions_are_told_apart(tmp_path: Path) -> None:
    tables = [Table("a", 50, 3), Table("b", 40, 5, Initial.normal(2.0, 0.1)), Table("c", 30, 3)]
    model = untrained(tables)
    parts = [model.save_part(tmp_path, 4, LAYOUT, p, None) for p in LAYOUT.places]
    publish(tmp_path, 4, parts, Facts(tables, CONFIG.optimizer_rule, LAYOUT))
    samples = take_samples(Checkpoint(tmp_path, 4), 20)
    assert [(s.table, s.rows, s.weights.shape) for s in samples] == [
        ("a", 50, (20, 3)),
        ("b", 40, (20, 5)),
        ("c", 30, (20, 3)),
    ]
    assert 1.5 < samples[1].weights.mean() < 2.5
