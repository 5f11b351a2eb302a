"""Models taken out of checkpoints: the rows that were saved, and nothing half written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from checkpoint_jobs import Model, small_chunks
from typer.testing import CliRunner

from planaria import Layout, Table
from planaria.checkpoints import DENSE, Checkpoint, Facts, PartWriter, publish
from planaria.checkpoints.manifest import MANIFEST, encode_manifest
from planaria.cli import app
from planaria.config import Config
from planaria.errors import CheckpointError, DamagedCheckpoint
from planaria.exporting import export, open_model
from planaria.trainer.dense import dlrm_layers

pytestmark = pytest.mark.usefixtures("small_chunks")
__all__ = ["small_chunks"]

LAYOUT = Layout.fresh(5, 1, 3)
CONFIG = Config.load(
    overrides=[
        "model.tables=3",
        "model.rows=70",
        "model.dim=4",
        "model.bottom=[6]",
        "model.top=[5]",
    ]
)
LAYERS = dlrm_layers(3, 4, [6], [5])
PARAMETERS = sum(layer.parameters for layer in LAYERS)


def saved(folder: Path) -> Model:
    """Step 8, and step 9, which has what changed since."""
    model = Model(0, CONFIG.tables, CONFIG.optimizer_rule)
    changed = None
    for step, base in ((8, ()), (9, (8,))):
        parts = [model.save_part(folder, step, LAYOUT, p, changed) for p in LAYOUT.places]
        with PartWriter(folder, step, DENSE) as dense:
            # Adagrad's sums follow, and are nobody's business.
            dense.add_bytes("dense", np.arange(step, step + 2 * PARAMETERS, dtype=np.float32))
            parts.append(dense.finish())
        config = CONFIG.to_dict()
        facts = Facts(CONFIG.tables, CONFIG.optimizer_rule, LAYOUT, base=base, config=config)
        publish(folder, step, parts, facts)
        if changed is None:
            changed = model.train()
    model.rows = [rows.view(np.float32) for rows in model.rows]  # of step 9
    return model


def test_the_newest_checkpoint_becomes_files_that_numpy_reads(tmp_path: Path) -> None:
    model, out = saved(tmp_path / "jobs"), tmp_path / "model"
    told: list[int] = []
    export(open_model(tmp_path / "jobs"), out, told.append)
    for number, table in enumerate(CONFIG.tables):
        expected = model.rows[0][number * 70 : (number + 1) * 70, :4]
        np.testing.assert_array_equal(np.load(out / f"tables/{table.name}.npy"), expected)
    assert sum(told) == 3 * 70
    facts = json.loads((out / "model.json").read_text())
    assert facts["step"] == 9
    first = {"name": CONFIG.tables[0].name, "rows": 70, "dim": 4, "optimizer": "adagrad"}
    assert facts["tables"][0] == first
    dense = np.load(out / "dense.npz")
    assert [dense[name].shape for name in dense] == [
        *((6, 13), (6,), (4, 6), (4,)),
        *((5, 4 + 6), (5,), (1, 5), (1,)),
    ]
    flat = np.concatenate([dense[name].ravel() for name in dense])
    np.testing.assert_array_equal(flat, np.arange(9, 9 + PARAMETERS, dtype=np.float32))


def test_an_earlier_step_can_be_named(tmp_path: Path) -> None:
    saved(tmp_path / "jobs")
    jobs, out = str(tmp_path / "jobs"), str(tmp_path / "model")
    done = CliRunner().invoke(app, ["export", jobs, out, "--step", "8"])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "model/model.json").read_text())["step"] == 8
    assert np.load(tmp_path / "model/dense.npz")["bottom.0.weight"][0, 0] == 8
    again = CliRunner().invoke(app, ["export", jobs, out])
    assert again.exit_code == 2
    assert "exists" in again.output


def test_an_older_checkpoint_is_not_taken_in_silence(tmp_path: Path) -> None:
    saved(tmp_path / "jobs")
    for part in (tmp_path / "jobs/step-00000009").glob("place-00003*.part"):
        os.truncate(part, 100)
    said: list[str] = []
    assert open_model(tmp_path / "jobs", say=said.append).step == 8
    assert len(said) == 1
    assert said[0].startswith("passed over step 9: ")


WRONG_NAMES = {
    "../../x": "path separator",
    "/etc/x": "path separator",
    "a\\b": "path separator",
    "..": "begins with a dot",
    ".hidden": "begins with a dot",
    "": "empty",
    "a\0b": "control character",
    "a\nb": "control character",
    "x" * 201: "more than 200 bytes",
    "\N{GREEK SMALL LETTER ALPHA}" * 101: "more than 200 bytes",
}


def forge_name(folder: Path, name: str) -> None:
    """A manifest with the right checksum, in which the first table is called `name`."""
    manifest = Checkpoint(folder, 8).manifest
    first = Table(name, manifest.tables[0].rows, manifest.tables[0].dim)
    forged = msgspec.structs.replace(manifest, tables=[first, *manifest.tables[1:]])
    (folder / "step-00000008" / MANIFEST).write_bytes(encode_manifest(forged)[0])


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_no_table_s_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    # A table named ../../x was written two folders further up.
    jobs = tmp_path / "a" / "b" / "jobs"
    saved(jobs)
    forge_name(jobs, name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DamagedCheckpoint, match=f"a table named .*{WRONG_NAMES[name]}"):
        export(open_model(jobs, 8), tmp_path / "a" / "b" / "model")
    assert sorted(tmp_path.rglob("*")) == before


def test_export_itself_writes_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second lock, behind a reader that would let the name pass."""
    jobs = tmp_path / "a" / "b" / "jobs"
    saved(jobs)
    forge_name(jobs, "../../../x")
    monkeypatch.setattr("planaria.checkpoints.manifest.name_problem", lambda name: None)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DamagedCheckpoint, match="is not the name of a file in"):
        export(open_model(jobs, 8), tmp_path / "a" / "b" / "model")
    assert sorted(tmp_path.rglob("*")) == before


def test_unusual_names_are_names(tmp_path: Path) -> None:
    saved(tmp_path / "jobs")
    for number, name in enumerate(["a..b", "user id", "TABLE1", "\N{GREEK SMALL LETTER ALPHA}"]):
        forge_name(tmp_path / "jobs", name)  # beside table1 and table2
        out = tmp_path / f"model{number}"
        export(open_model(tmp_path / "jobs", 8), out)
        assert np.load(out / "tables" / f"{name}.npy").shape == (70, 4)


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    model = Model(0, [Table("a/b", 10, 4)])
    with pytest.raises(CheckpointError, match=r"'a/b' cannot be saved.*another name"):
        model.save(tmp_path, 1, LAYOUT)
    assert not (tmp_path / "step-00000001" / MANIFEST).exists()


def no_space(*_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_exported_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "jobs")
    for part in (tmp_path / "jobs/step-00000009").glob("place-00003*.part"):
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="do not match their checksum"):
        export(open_model(tmp_path / "jobs"), tmp_path / "model")
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(CheckpointError, match="No space left"):
        export(open_model(tmp_path / "jobs", 8), tmp_path / "model")
    with pytest.raises(CheckpointError, match="nothing' does not exist; name"):
        open_model(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="has no checkpoint of step 7; it has 8, 9"):
        open_model(tmp_path / "jobs", 7)
    with pytest.raises(CheckpointError, match="does not exist"):
        export(open_model(tmp_path / "jobs", 8), tmp_path / "no folder" / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["jobs"]
