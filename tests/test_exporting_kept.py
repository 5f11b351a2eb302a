"""What a script kept, taken out of its checkpoint: a stock twin of its model loads it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_jobs import Model

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from planaria import Layout, Optimizer, Table  # noqa: E402
from planaria.checkpoints import DENSE, Facts, PartWriter, publish  # noqa: E402
from planaria.config import Config  # noqa: E402
from planaria.exporting import FORMATS, export, open_model  # noqa: E402
from planaria.torch.frozen import pack  # noqa: E402

pytestmark = pytest.mark.torch

LAYOUT = Layout.fresh(3, 1, 2)
TABLES = [Table("user", 31, 4), Table("item", 12, 4)]


class Twin(nn.Module):  # type: ignore[misc]
    """In plain torch: a table, and what is dense."""

    def __init__(self, with_tables: bool = True) -> None:
        super().__init__()
        if with_tables:
            self.user = nn.EmbeddingBag(31, 4)
        self.top = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def kept() -> dict[str, Any]:
    """As Job.keep would have it after a step."""
    torch.manual_seed(3)
    model = Twin(with_tables=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.top(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    own = {
        "mean": np.float64(0.5),
        "counts": Counter({"a": 2}),
        "seen": np.arange(3, dtype=np.int16),
        "halves": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "blob": b"xyz",
        "dtype": torch.float16,
    }
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "own": own}


def saved(folder: Path, states: dict[str, Any]) -> dict[str, Any]:
    """Saves a script's job at step 5; returns the weights of its tables."""
    config = Config().to_dict() | {
        "tables": [{"name": t.name, "rows": t.rows, "dim": t.dim} for t in TABLES]
    }
    config["data"]["source"] = "script"
    model = Model(1, TABLES, Optimizer("sgd"))
    parts = [model.save_part(folder, 5, LAYOUT, place) for place in LAYOUT.places]
    with PartWriter(folder, 5, DENSE) as dense:
        dense.add_bytes("dense", pack(states))
        parts.append(dense.finish())
    publish(folder, 5, parts, Facts(TABLES, model.optimizer, LAYOUT, config=config))
    rows = model.rows[0].view(np.float32)
    return {"user": rows[:31], "item": rows[31:]}


def test_a_stock_twin_loads_what_was_kept_and_its_tables(tmp_path: Path) -> None:
    states = kept()
    tables = saved(tmp_path / "jobs", states)
    export(open_model(tmp_path / "jobs"), tmp_path / "model", to="torch")
    found = torch.load(tmp_path / "model/kept.pt", weights_only=True)
    rows = torch.load(tmp_path / "model/tables.pt", weights_only=True, mmap=True)
    twin = Twin()
    missing = twin.load_state_dict(found["model"], strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["user.weight"], [])
    twin.user.load_state_dict({"weight": rows["embedding_bags.user.weight"]})
    for key, value in states["model"].items():
        assert torch.equal(twin.state_dict()[key], value)
    assert twin.user.weight.detach().numpy().tobytes() == tables["user"].tobytes()
    optimizer = torch.optim.Adam(Twin(with_tables=False).parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    own = found["own"]
    assert (own["mean"], own["counts"], own["blob"]) == (0.5, {"a": 2}, b"xyz")
    assert own["seen"].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_has_what_was_kept_beside_the_tables(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    states = kept()
    tables = saved(tmp_path / "jobs", states)
    export(open_model(tmp_path / "jobs"), tmp_path / "model", to="dcp")
    twin = Twin(with_tables=False)
    wanted = {"model": twin.state_dict(), "embedding_bags.item.weight": torch.empty(12, 4)}
    dcp.load(wanted, checkpoint_id=tmp_path / "model")
    for key, value in states["model"].items():
        assert torch.equal(wanted["model"][key], value)
    assert wanted["embedding_bags.item.weight"].numpy().tobytes() == tables["item"].tobytes()


@pytest.mark.parametrize("to", ["numpy", "safetensors"])
def test_files_without_structure_have_dotted_keys_and_name_what_they_lack(
    tmp_path: Path, to: str
) -> None:
    states = kept()
    saved(tmp_path / "jobs", states)
    export(open_model(tmp_path / "jobs"), tmp_path / "model", to=to)
    if to == "numpy":
        found = dict(np.load(tmp_path / "model/kept.npz"))
    else:
        library = pytest.importorskip("safetensors.torch")
        read = library.load_file(tmp_path / "model/kept.safetensors")
        assert torch.equal(read.pop("own.halves"), states["own"]["halves"])
        found = {key: tensor.numpy() for key, tensor in read.items()}
    for key, value in states["model"].items():
        np.testing.assert_array_equal(found[f"model.{key}"], value.numpy())
    exp_avg = states["optimizer"]["state"][0]["exp_avg"]
    np.testing.assert_array_equal(found["optimizer.state.0.exp_avg"], exp_avg.numpy())
    facts = json.loads((tmp_path / "model/model.json").read_text())
    assert facts["kept"]["optimizer.param_groups.0.lr"] == 0.01
    assert facts["kept"]["own.counts.a"] == 2
    lacks = {"own.blob", "own.dtype"} | ({"own.halves"} if to == "numpy" else set())
    assert set(facts["kept_left_out"]) == lacks


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_but_finished_files_is_left(tmp_path: Path, to: str) -> None:
    saved(tmp_path / "jobs", kept())
    export(open_model(tmp_path / "jobs"), tmp_path / "model", to=to)
    files = {
        "numpy": {"kept.npz", "tables"},
        "torch": {"kept.pt", "tables.pt"},
        "safetensors": {"kept.safetensors", "tables.safetensors"},
        "dcp": {".metadata", "__0_0.distcp"},
    }[to]
    found = {path.name for path in (tmp_path / "model").iterdir()}
    assert found == files | {"model.json", "dense.state"}
