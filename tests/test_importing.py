"""Models from elsewhere become checkpoints: their rows, bit for bit, or a sentence and nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_jobs import Model, small_chunks
from typer.testing import CliRunner

from planaria import Layout
from planaria.checkpoints import DENSE, Checkpoint, Facts, PartWriter, latest, publish
from planaria.cli import app
from planaria.cluster.parts import read_dense
from planaria.cluster.resuming import find_start, load_saved
from planaria.config import Config
from planaria.errors import CheckpointError, ConfigError, DataError
from planaria.exporting import FORMATS, dense_shapes, export, open_model
from planaria.foreign import open_foreign
from planaria.importing import IN_ORDER, fit, import_model
from planaria.trainer.dense import DenseState, dlrm_layers, initial_weights

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("small_chunks")]
__all__ = ["small_chunks"]

LAYOUT = Layout.fresh(4, 1, 2)
SETS = ["model.tables=3", "model.rows=70", "model.dim=4", "model.bottom=[6]", "model.top=[5]"]
CONFIG = Config.load(overrides=[*SETS, "optimizer.name=adam"])
PARAMETERS = sum(int(np.prod(shape)) for shape in dense_shapes(CONFIG).values())


def saved(folder: Path) -> Model:
    """A job's checkpoint of step 9."""
    model = Model(0, CONFIG.tables, CONFIG.optimizer_rule)
    weights = np.random.default_rng(1).normal(size=model.rows[0].shape).astype(np.float32)
    model.rows = [weights.view(np.uint32)]
    dense = DenseState(PARAMETERS, CONFIG.optimizer_rule, initial=weights.ravel()[:PARAMETERS])
    dense.apply(1, np.full(PARAMETERS, 0.1, np.float32))
    parts = [model.save_part(folder, 9, LAYOUT, place) for place in LAYOUT.places]
    with PartWriter(folder, 9, DENSE) as part:
        part.add_bytes("dense", dense.export())
        parts.append(part.finish())
    facts = Facts(CONFIG.tables, CONFIG.optimizer_rule, LAYOUT, config=CONFIG.to_dict())
    publish(folder, 9, parts, facts)
    return model


def records(checkpoint: Checkpoint) -> Any:
    """Of the only arena, by row."""
    out = np.zeros((checkpoint.arenas[0].rows, checkpoint.arenas[0].words), np.uint32)
    for piece in checkpoint.read(IN_ORDER, 0):
        out[piece.index] = piece.records
    return out


def imported(folder: Path) -> Checkpoint:
    found = latest(folder, verify=True).checkpoint
    assert found is not None
    return found


@pytest.mark.parametrize("to", FORMATS)
def test_what_was_exported_with_its_optimizer_goes_on_at_its_step(tmp_path: Path, to: str) -> None:
    model = saved(tmp_path / "jobs")
    source = open_model(tmp_path / "jobs")
    export(source, tmp_path / "model", to=to, with_state=True)
    words = ["import", str(tmp_path / "model"), str(tmp_path / "new"), "--set", "steps=20"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = imported(tmp_path / "new")
    assert (found.step, found.manifest.samples) == (9, 9 * CONFIG.batch)
    np.testing.assert_array_equal(records(found), model.rows[0])
    np.testing.assert_array_equal(found.dense()["dense"], source.dense()["dense"])
    config, _ = load_saved([f"checkpoint.path={tmp_path / 'new'}"])
    start = find_start(config, resume=True)
    assert (config.steps, start.step, start.restores) == (20, 9, True)


@pytest.mark.parametrize("to", FORMATS)
def test_what_was_exported_without_it_begins_at_step_0(tmp_path: Path, to: str) -> None:
    model = saved(tmp_path / "jobs")
    export(open_model(tmp_path / "jobs"), tmp_path / "model", to=to)
    told: list[int] = []
    import_model(fit(open_foreign(tmp_path / "model"), CONFIG), str(tmp_path / "new"), told.append)
    found = imported(tmp_path / "new")
    assert (found.step, sum(told)) == (0, 3 * 70)
    np.testing.assert_array_equal(records(found)[:, :4], model.rows[0][:, :4])
    assert not records(found)[:, 4:].any()  # Adam begins with zeros
    config, _ = load_saved([f"checkpoint.path={tmp_path / 'new'}"])
    start = find_start(config, resume=True)
    assert (start.step, start.imported, start.restores) == (0, True, True)
    assert "starting with the model that was imported" in start.notes[-1]


def stock(rows: Model, key: Callable[[str], str] = "net.{}.weight".format) -> dict[str, Any]:
    """A state_dict of anybody's."""
    weights = rows.rows[0].view(np.float32)[:, :4]
    tables = enumerate(CONFIG.tables)
    return {key(t.name): torch.tensor(weights[70 * n : 70 * (n + 1)]) for n, t in tables}


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_stock_state_dict_becomes_step_0_of_a_job(tmp_path: Path, ending: str) -> None:
    model = saved(tmp_path / "jobs")
    state = {**stock(model), "head.weight": torch.ones(2, 3), "head.bias": torch.ones(2)}
    path = tmp_path / f"stock{ending}"
    if ending == ".pt":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(state, path)
    sets = [word for one in SETS for word in ("--set", one)]
    done = CliRunner().invoke(app, ["import", str(path), str(tmp_path / "new"), *sets])
    assert done.exit_code == 0, done.output
    assert "the dense part is a fresh job's" in done.output
    found = imported(tmp_path / "new")
    assert (found.step, found.manifest.dense_parts) == (0, [])
    np.testing.assert_array_equal(records(found)[:, :4], model.rows[0][:, :4])
    config, _ = load_saved([f"checkpoint.path={tmp_path / 'new'}"])
    assert read_dense(config, found.job, 0) is None


def test_a_dense_part_in_a_state_dict_is_taken_and_its_optimizer_is_fresh(tmp_path: Path) -> None:
    model = saved(tmp_path / "jobs")
    flat = initial_weights(dlrm_layers(3, 4, [6], [5]), seed=4)
    state, rest = stock(model), torch.tensor(flat)
    for key, shape in dense_shapes(CONFIG).items():
        state[key], rest = rest[: int(np.prod(shape))].reshape(shape), rest[int(np.prod(shape)) :]
    torch.save(state, tmp_path / "stock.pt")
    fitted = fit(open_foreign(tmp_path / "stock.pt"), CONFIG)
    expected = DenseState(PARAMETERS, CONFIG.optimizer_rule, initial=flat).export()
    assert fitted.dense is not None
    np.testing.assert_array_equal(fitted.dense, expected)
    del state["top.1.bias"]
    torch.save(state, tmp_path / "stock.pt")
    with pytest.raises(ConfigError, match=r"model: expected top.1.bias, float32 of 1, .*got none"):
        fit(open_foreign(tmp_path / "stock.pt"), CONFIG)


def test_another_optimizer_begins_with_the_weights(tmp_path: Path) -> None:
    saved(tmp_path / "jobs")
    export(open_model(tmp_path / "jobs"), tmp_path / "model", with_state=True)
    job = Config.load(overrides=[*SETS, "optimizer.name=momentum"])
    fitted = fit(open_foreign(tmp_path / "model"), job)
    dense = np.load(tmp_path / "model/dense.npz")
    flat = np.concatenate([dense[key].ravel() for key in dense])
    assert fitted.step == 0
    assert fitted.dense is not None
    state = DenseState(PARAMETERS, job.optimizer_rule, initial=flat).export()
    np.testing.assert_array_equal(fitted.dense, state)


def test_names_that_end_in_other_names_are_told_apart(tmp_path: Path) -> None:
    tables = [{"name": name, "rows": 2, "dim": 1} for name in ("b", "a.b")]
    job = Config.from_dict({"tables": tables})
    state = {"x.a.b.weight": torch.ones(2, 1), "x.b.weight": torch.zeros(2, 1)}
    torch.save(state, tmp_path / "stock.pt")
    b, ab = fit(open_foreign(tmp_path / "stock.pt"), job).tables
    assert (b.weights.read().sum(), ab.weights.read().sum()) == (0, 2)


def test_what_a_script_kept_is_not_taken_for_a_table(tmp_path: Path) -> None:
    state = {f"embedding_bags.{t.name}.weight": torch.ones(70, 4) for t in CONFIG.tables}
    kept = {"model.embedding_bags.small.weight": torch.ones(2, 2), "m.table0.weight": torch.ones(1)}
    (tmp_path / "model").mkdir()
    torch.save({**state, **kept}, tmp_path / "model/tables.pt")
    (tmp_path / "model/model.json").write_text(json.dumps({"step": 3}))
    assert len(fit(open_foreign(tmp_path / "model"), CONFIG).tables) == 3


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "rows": (
        lambda s: s.update({"net.table1.weight": torch.ones(71, 4)}),
        "table table1: expected weights of 70 x 4, as the job has it, got 71 x 4",
    ),
    "dim": (
        lambda s: s.update({"net.table1.weight": torch.ones(70, 3)}),
        "table table1: expected weights of 70 x 4, as the job has it, got 70 x 3",
    ),
    "missing": (
        lambda s: s.pop("net.table2.weight"),
        "table table2: expected one key that ends in table2.weight",
    ),
    "twice": (
        lambda s: s.update({"old.table2.weight": torch.ones(70, 4)}),
        "got net.table2.weight, old.table2.weight, more than one",
    ),
    "unknown": (
        lambda s: s.update({"m.embedding_bags.shop.weight": torch.ones(5, 4)}),
        "table shop: .* has it, and the job does not",
    ),
    "dtype": (
        lambda s: s.update({"net.table0.weight": torch.ones(70, 4, dtype=torch.bfloat16)}),
        "table table0: expected weights of float32, got bfloat16",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_the_name_of_its_table(tmp_path: Path, wrong: str) -> None:
    change, sentence = WRONG[wrong]
    state = stock(saved(tmp_path / "jobs"))
    change(state)
    torch.save(state, tmp_path / "stock.pt")
    with pytest.raises(ConfigError, match=sentence):
        fit(open_foreign(tmp_path / "stock.pt"), CONFIG)


def test_nothing_is_left_of_an_import_that_fails(tmp_path: Path) -> None:
    state = stock(saved(tmp_path / "jobs"))
    state["net.table2.weight"][7, 1] = float("nan")
    torch.save(state, tmp_path / "stock.pt")
    fitted = fit(open_foreign(tmp_path / "stock.pt"), CONFIG)
    with pytest.raises(DataError, match=r"table table2: row 7 has a weight that is no number"):
        import_model(fitted, str(tmp_path / "new"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError):
        import_model(fitted, str(tmp_path / "mine"))
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "mine").iterdir()) == []


class Evil:
    def __reduce__(self) -> Any:
        return print, ("whatever is in a pickle is done",)


def test_what_is_no_model_and_no_place_for_one_gets_a_sentence(tmp_path: Path) -> None:
    saved(tmp_path / "jobs")
    export(open_model(tmp_path / "jobs"), tmp_path / "model", to="safetensors")

    def tried(model: str, checkpoints: str = "new") -> tuple[int, str]:
        paths = [str(tmp_path / model), str(tmp_path / checkpoints)]
        done = CliRunner().invoke(app, ["import", *paths])
        assert not (tmp_path / "new").exists()
        return done.exit_code, " ".join(done.output.split())

    code, said = tried("model", "jobs")
    assert code == 2
    assert "has checkpoints already, of step 9; name another folder" in said
    assert tried("nothing")[0] == tried("jobs")[0] == 2
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 torn")
    code, said = tried("torn.pt")
    assert code == 1
    assert "torn.pt' cannot be read" in said
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    assert tried("list.pt") == (
        1,
        f"error: '{tmp_path / 'list.pt'}' cannot be read: it holds a list; save "
        "model.state_dict(), and nothing else",
    )
    torch.save(Evil(), tmp_path / "evil.pt")
    assert tried("evil.pt") == (
        1,
        f"error: '{tmp_path / 'evil.pt'}' cannot be read: it holds more than tensors in "
        "containers; save model.state_dict(), and nothing else",
    )
    with (tmp_path / "model/tables.safetensors").open("r+b") as file:
        file.truncate(3000)
    code, said = tried("model")
    assert code == 1
    assert "it is cut off" in said
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "model").mkdir()
    torch.save({"a.weight": torch.ones(1)}, tmp_path / "model/tables.pt")
    (tmp_path / "model/model.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"model.json' cannot be read"):
        open_foreign(tmp_path / "model")
