"""Tables of several shapes and optimizers, taken out for NumPy, torch and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_jobs import Model, small_chunks
from typer.testing import CliRunner

from planaria import Layout, Optimizer, Table
from planaria.checkpoints import Facts, publish
from planaria.cli import app
from planaria.config import Config
from planaria.exporting import FORMATS, export, open_model

pytestmark = pytest.mark.usefixtures("small_chunks")
__all__ = ["small_chunks"]

LAYOUT = Layout.fresh(4, 1, 2)
TABLES = [
    Table("user", 61, 3),
    Table("item", 40, 5, optimizer=Optimizer("adam", eps=1e-8)),
    Table("shop", 17, 3, optimizer=Optimizer("rowwise_adagrad")),
    Table("day.of week", 9, 3),
    Table("sex", 2, 1, optimizer=Optimizer("sgd")),
    Table("page", 30, 5, optimizer=Optimizer("momentum")),
]
STATE = {
    "user.sum": (3, 6),
    "day.of week.sum": (3, 6),
    "item.exp_avg": (5, 10),
    "item.exp_avg_sq": (10, 15),
    "item.step": (15, 16),
    "shop.sum": (3, 4),
    "page.momentum_buffer": (5, 10),
}
"""Which words of a record are what, said again."""


def saved(folder: Path) -> dict[str, Any]:
    """Saves a model; returns what must come out: by table, its records."""
    values = Config().to_dict() | {
        "tables": [
            {"name": t.name, "rows": t.rows, "dim": t.dim}
            | ({"optimizer": {"name": t.optimizer.name}} if t.optimizer else {})
            for t in TABLES
        ]
    }
    model = Model(5, TABLES, Optimizer("adagrad"))
    parts = [model.save_part(folder, 3, LAYOUT, place) for place in LAYOUT.places]
    publish(folder, 3, parts, Facts(TABLES, model.optimizer, LAYOUT, config=values))
    return {
        TABLES[number].name: rows[first : first + TABLES[number].rows]
        for arena, rows in zip(model.arenas, model.rows, strict=True)
        for number, first in zip(arena.table_ids, arena.first_rows, strict=True)
    }


def read_dcp(out: Path) -> dict[str, Any]:
    """As torch makes one file of it."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(out, out.with_suffix(".pt"))
    found: dict[str, Any] = torch.load(out.with_suffix(".pt"), weights_only=True)
    return found


def read(out: Path, to: str, what: str) -> dict[str, Any]:
    """All arrays of one kind, by key."""
    if to == "dcp":
        arrays = {key: tensor.numpy() for key, tensor in read_dcp(out).items()}
        if what == "tables":
            return {key: array for key, array in arrays.items() if key.endswith(".weight")}
        state = {key: array for key, array in arrays.items() if not key.endswith(".weight")}
        return {key.removeprefix("embedding_bags."): array for key, array in state.items()}
    if to == "numpy":
        files = (out / what).glob("*.npy")
        found = {path.name.removesuffix(".npy"): np.load(path) for path in files}
        weights = {f"embedding_bags.{name}.weight": found[name] for name in found}
        return weights if what == "tables" else found
    if to == "torch":
        torch = pytest.importorskip("torch")
        state = torch.load(out / f"{what}.pt", weights_only=True, mmap=True)
        return {key: tensor.numpy() for key, tensor in state.items()}
    content = (out / f"{what}.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    data, dtypes = content[8 + length :], {"F32": np.float32, "I32": np.int32}
    ends = [0, *(entry["data_offsets"][1] for entry in header.values())]
    assert [entry["data_offsets"][0] for entry in header.values()] == ends[:-1]
    assert (len(data), length % 8) == (ends[-1], 0)
    return {
        key: np.frombuffer(data[slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for key, entry in header.items()
    }


@pytest.mark.torch
@pytest.mark.parametrize("to", FORMATS)
def test_every_table_comes_out_with_its_own_shape_and_state(tmp_path: Path, to: str) -> None:
    expected = saved(tmp_path / "jobs")
    export(open_model(tmp_path / "jobs"), tmp_path / "model", to=to, with_state=True)
    tables = read(tmp_path / "model", to, "tables")
    assert tables.keys() == {f"embedding_bags.{table.name}.weight" for table in TABLES}
    for table in TABLES:
        found = tables[f"embedding_bags.{table.name}.weight"]
        assert (found.shape, found.dtype) == ((table.rows, table.dim), np.float32)
        assert found.tobytes() == expected[table.name][:, : table.dim].tobytes()
    state = read(tmp_path / "model", to, "optimizer")
    assert state.keys() == STATE.keys()
    for key, (first, end) in STATE.items():
        name = key.rpartition(".")[0]
        one_number = key in ("item.step", "shop.sum")
        rows = len(expected[name])
        assert state[key].shape == ((rows,) if one_number else (rows, end - first))
        assert state[key].dtype == (np.int32 if key == "item.step" else np.float32)
        assert state[key].tobytes() == expected[name][:, first:end].tobytes()
    names = {path.name.partition(".")[0] for path in (tmp_path / "model").iterdir()}
    assert names == ({"", "__0_0", "model"} if to == "dcp" else {"tables", "optimizer", "model"})


def test_the_library_of_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    saved(tmp_path / "jobs")
    export(open_model(tmp_path / "jobs"), tmp_path / "model", to="safetensors")
    found = library.load_file(tmp_path / "model/tables.safetensors")
    ours = read(tmp_path / "model", "safetensors", "tables")
    assert found.keys() == ours.keys()
    assert all(found[key].tobytes() == ours[key].tobytes() for key in ours)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_loads_into_tables_of_stock_torch_without_a_process_group(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    expected = saved(tmp_path / "jobs")
    export(open_model(tmp_path / "jobs"), tmp_path / "model", to="dcp")
    model = torch.nn.Module()
    bags = {table.name: torch.nn.EmbeddingBag(table.rows, table.dim) for table in TABLES[:3]}
    model.embedding_bags = torch.nn.ModuleDict(bags)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "model")
    model.load_state_dict(state)
    for table in TABLES[:3]:
        found = bags[table.name].weight.detach().numpy()
        assert found.tobytes() == expected[table.name][:, : table.dim].tobytes()


def test_the_command_takes_a_format_and_refuses_others(tmp_path: Path) -> None:
    saved(tmp_path / "jobs")
    words = ["export", str(tmp_path / "jobs"), str(tmp_path / "model"), "--to"]
    wrong = CliRunner().invoke(app, [*words, "onnx"])
    assert wrong.exit_code == 2
    assert "--to: expected numpy, safetensors, torch, dcp, got 'onnx'" in wrong.output
    done = CliRunner().invoke(app, [*words, "safetensors"])
    assert done.exit_code == 0, done.output
    found = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert found == ["model.json", "tables.safetensors"]  # no optimizer unless wanted
    facts = json.loads((tmp_path / "model/model.json").read_text())["tables"]
    assert [table["optimizer"] for table in facts] == [
        "adagrad", "adam", "rowwise_adagrad", "adagrad", "sgd", "momentum"
    ]  # fmt: skip
