"""`planaria train` with a model and files that the configuration names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cluster_commands import LIMIT_S, MAIN
from typer.testing import CliRunner

from planaria.cli import app
from planaria.config import Config
from planaria.data import auc
from planaria.data.split import Split
from planaria.errors import PlanariaError
from planaria.exporting import open_model
from planaria.models.building import make_model, open_data, table_configs
from planaria.models.predicting import Predictor
from planaria.torch import EmbeddingBagCollection

SAMPLES, BATCH = 6_000, 200
SCHEMA = """
label: click
dense:
  - {column: price, log: true}
sparse:
  - {column: user, rows: 2000, type: integer}
  - {column: tags, rows: 100, type: integer, many: true}
"""
DCN = ("--set", "model.name=dcn_v2")
MINE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__()
        self.tables = embedding_bag_collection
        self.top = nn.Linear(dense_in_features + 2 * 8, 1)

    def forward(self, dense_features, sparse_features):
        pooled = self.tables(sparse_features).values()
        return self.top(torch.cat([dense_features, pooled], 1)).squeeze(1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clicks that follow the user and the tags."""
    folder, random = tmp_path_factory.mktemp("clicks"), np.random.default_rng(5)
    users = random.integers(0, 300, SAMPLES)
    tags = [random.integers(0, 100, random.integers(0, 4)).tolist() for _ in range(SAMPLES)]
    liked = (users % 3 == 0) * 2.0 + np.array([sum(t % 2 for t in some) for some in tags]) - 1.5
    clicks = (random.random(SAMPLES) < 1 / (1 + np.exp(-liked))).astype(np.int64)
    price = random.exponential(10, SAMPLES)
    table = pa.table({"click": clicks, "user": users, "tags": tags, "price": price})
    pq.write_table(table, folder / "clicks.parquet", row_group_size=1000)
    (folder / "schema.yaml").write_text(SCHEMA)
    (folder / "mine.py").write_text(MINE)
    return folder


def settings() -> list[str]:
    sets = {
        "data.source": "files",
        "data.path": "clicks.parquet",
        "data.schema": "schema.yaml",
        "data.epochs": 3,
        "batch": BATCH,
        "model.dim": 8,
        "optimizer.lr": 0.1,
        "cluster.heartbeat_limit_ms": 20000,
    }
    return [f"{key}={value}" for key, value in sets.items()]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, "train", *words, "--report", "report.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "COLUMNS": "400"},
    )


def train(folder: Path, *words: str) -> dict[str, object]:
    """The report of a job on these files, which has to end well."""
    done = run(folder, *(word for one in settings() for word in ("--set", one)), *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads((folder / "report.json").read_text())
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, object]:
    """A job that nobody disturbs and nothing protects."""
    return train(folder, *DCN, "--set", "strategy=none", "--set", "servers=2")


def test_a_named_model_learns_from_files(alone: dict[str, object]) -> None:
    assert isinstance(alone["auc"], float)
    assert alone["auc"] > 0.7
    assert alone["test_samples"] == 600  # a tenth
    assert alone["steps"] == 3 * (SAMPLES - 600) // BATCH
    assert isinstance(alone["loss"], float)


@pytest.mark.campaign
def test_kills_change_no_bit(folder: Path, alone: dict[str, object]) -> None:
    kills = ("--kill", "server:1@20", "--kill", "trainer:1@40", "--kill", "coordinator@50")
    beaten = train(folder, *DCN, *kills)
    assert (beaten["digest"], beaten["auc"]) == (alone["digest"], alone["auc"])


@pytest.mark.campaign
def test_a_job_of_files_goes_on_from_its_checkpoint_without_its_settings(
    folder: Path, alone: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)  # where data.schema is found
    saved = ("--set", "checkpoint.path=saved")
    train(folder, *DCN, *saved, "--set", "data.epochs=1")
    done = run(folder, *saved, "--set", "data.epochs=3", "--resume")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "report.json").read_text())["digest"] == alone["digest"]
    # By then the checkpoint is the trained model, which scores the held-out samples as the job did.
    with Predictor(open_model(folder / "saved"), folder) as model:
        scores = [one.logits for one in model.score(folder / "clicks.parquet")]
    held_out = Split(SAMPLES, 0.1, seed=0).held_out_sample(np.arange(600))
    labels = pq.read_table(folder / "clicks.parquet")["click"].to_numpy()[held_out]
    assert auc(labels, np.concatenate(scores)[held_out]) == pytest.approx(alone["auc"], abs=1e-6)
    monkeypatch.chdir(folder.parent)
    scored = ["predict", f"{folder}/saved", f"{folder}/clicks.parquet", f"{folder}/scores.npy"]
    assert CliRunner().invoke(app, scored).exit_code != 0
    other = folder / "other.yaml"
    other.write_text(SCHEMA.replace("2000", "1000"))
    refused = CliRunner().invoke(app, [*scored, "--schema", str(other)])
    assert refused.exit_code == 2
    assert "but the model was trained with {'user': 2000, 'tags': 100}" in refused.output
    named = CliRunner().invoke(app, [*scored, "--schema", f"{folder}/schema.yaml"])
    assert named.exit_code == 0, named.output
    assert np.load(folder / "scores.npy").shape == (SAMPLES,)


@pytest.mark.campaign
def test_tables_of_others_are_imported_by_the_schema_of_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that no schema names were looked for."""
    monkeypatch.chdir(folder)
    rows = {"net.user.weight": torch.ones(2000, 8), "net.tags.weight": torch.ones(100, 8)}
    torch.save(rows, "stock.pt")
    (folder / "job.yaml").write_text("model:\n  name: dcn_v2\n")
    words = [word for one in settings() for word in ("--set", one)]
    done = CliRunner().invoke(app, ["import", "stock.pt", "ck", "--config", "job.yaml", *words])
    assert done.exit_code == 0, done.output
    assert "step 0, 2,100 rows: ck" in done.output
    resumed = run(folder, "--resume", "--set", "checkpoint.path=ck", "--set", "data.epochs=1")
    assert resumed.returncode == 0, resumed.stderr


def test_the_built_in_model_scores_lines_as_its_job_did(tmp_path: Path) -> None:
    random, lines = np.random.default_rng(6), []
    for _ in range(2400):
        ids = random.integers(0, 50, 26)
        numbers = "\t".join(map(str, random.integers(0, 9, 13)))
        clicked = int(random.random() < 0.2 + 0.6 * (ids[0] % 2))
        lines.append(f"{clicked}\t{numbers}\t" + "\t".join(f"{one:x}" for one in ids) + "\n")
    (tmp_path / "all.txt").write_text("".join(lines))
    (tmp_path / "last.txt").write_text("".join(lines[2000:]))
    unlabelled = "".join(line.partition("\t")[2] for line in lines[2000:])
    (tmp_path / "unlabelled.txt").write_text(unlabelled)
    sets = ["data.source=criteo", "data.path=all.txt", "data.test_samples=400", "steps=20"]
    sets += ["batch=100", "model.rows=100", "checkpoint.path=saved", "optimizer.lr=0.2"]
    done = run(tmp_path, *(word for one in sets for word in ("--set", one)))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "folder").mkdir()
    (tmp_path / "unlabelled.txt").rename(tmp_path / "folder" / "unlabelled.txt")
    for name in ("last.txt", "folder"):
        words = ("predict", "saved", name, f"{name}.npy")
        command = [sys.executable, "-c", MAIN, *words]
        scored = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert scored.returncode == 0, scored.stderr
        assert ("AUC" in scored.stdout) == (name == "last.txt")
    found = np.load(tmp_path / "last.txt.npy")
    labels = np.array([int(line[0]) for line in lines[2000:]])
    assert auc(labels, found) == pytest.approx(report["auc"], abs=1e-6)
    assert np.array_equal(found, np.load(tmp_path / "folder.npy"))


@pytest.mark.campaign
def test_a_class_of_ones_own_is_found_in_the_folder(folder: Path) -> None:
    found = train(folder, "--set", "model.name=mine:Model", "--kill", "server:any@30")
    assert isinstance(found["auc"], float)
    assert found["auc"] > 0.7


def test_a_named_model_learns_from_samples_without_end(tmp_path: Path) -> None:
    sets = ["model.name=deepfm", "steps=30", "batch=64", "trainers=1", "script.spares=0"]
    sets += ["strategy=none", "servers=2", "spares=0", "model.rows=300", "data.test_samples=200"]
    done = run(tmp_path, *(word for one in sets for word in ("--set", one)))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["steps"], report["test_samples"]) == (30, 200)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.schema=other.yaml", "has no column 'usr'"),
        ("data.path=cut.parquet", "damaged or cut off"),
        ("data.path=nothing/*.parquet", "data.path: expected files, but there are no"),
        ("data.schema=nothing.yaml", "data.schema: expected a file, but there is no"),
        ("model.name=dcn", "did you mean dcn_v2?"),
        ("model.name=nowhere:Model", "there is no module nowhere"),
        ("model.dim=1", "model.name: deepfm does not fit the data"),
    ],
)
def test_what_is_wrong_gets_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str, sentence: str
) -> None:
    monkeypatch.chdir(folder)
    Path("other.yaml").write_text(SCHEMA.replace("user", "usr"))
    Path("cut.parquet").write_bytes(Path("clicks.parquet").read_bytes()[:5000])
    with pytest.raises(PlanariaError, match=re.escape(sentence)):
        make_all([*settings(), "model.name=deepfm", setting])


def make_all(sets: list[str]) -> None:
    config = Config.load(None, sets)
    schema = open_data(config).schema
    make_model(config, schema, EmbeddingBagCollection(table_configs(schema, config.model.dim)))


def test_the_command_ends_with_that_sentence_and_nothing_else(folder: Path) -> None:
    one_trainer = ("--set", "trainers=1", "--set", "script.spares=0")
    sets = [word for one in settings() for word in ("--set", one)]
    done = run(folder, *sets, *one_trainer, "--set", "model.name=dcn")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no model 'dcn'; did you mean dcn_v2?")
    assert "Traceback" not in done.stdout + done.stderr
