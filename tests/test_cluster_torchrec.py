"""TorchRec's own models as the trainers of a job, and what they learnt, back in TorchRec: the same
predictions, bit for bit."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cluster_jobs import leaving_nothing
from script_jobs import run_script
from typer.testing import CliRunner

from planaria import kernels
from planaria.cli import app
from planaria.kernels.types import PooledFeatures, Pooling

with warnings.catch_warnings():  # of parts of FBGEMM that need a GPU
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "torchrec",
        exc_type=ImportError,
        reason="TorchRec is not installed; docs/own-model.md says how",
    )
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

EXAMPLE = Path(__file__).parent.parent / "examples" / "torchrec_dlrm.py"
JOB = ("servers=3", "parity=1", "trainers=2", "script.spares=1", "threads.trainer=1")
KILLS = ("--kill=server:any@12", "--kill=trainer:0@24")


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """As the job's trainers: another number adds in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torchrec_dlrm", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_torchrec_alone(name: str, exported: Path, dense: dict[str, Any]) -> torch.nn.Module:
    """The model with TorchRec's own collection, holding what a job has learnt."""
    there = example()
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature}",
            num_embeddings=rows,
            embedding_dim=there.DIM,
            feature_names=[feature],
        )
        for feature, rows in there.ROWS.items()
    ]
    model = there.model_of(name, EmbeddingBagCollection(tables=tables))
    place = "sparse_arch.embedding_bag_collection."
    learnt = torch.load(exported / "tables.pt")
    model.load_state_dict({**dense, **{place + key: rows for key, rows in learnt.items()}})
    return model


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("name", ["DLRM", "DLRM_DCN"])
@pytest.mark.campaign
def test_what_their_model_learns_under_kills_predicts_the_same_in_torchrec_alone(
    name: str, tmp_path: Path
) -> None:
    saved, out, exported = (tmp_path / name for name in ("saved", "dense.pt", "exported"))
    words = ("--model", name, "--samples", "7200", "--out", str(out))
    sets = (*JOB, f"checkpoint.path={saved}")
    done = run_script(tmp_path, str(EXAMPLE), *words, sets=sets, options=KILLS)
    assert done.code == 0, done.out + done.error
    assert [one["who"].split(":")[0] for one in done.report["failures"]] == ["server", "trainer"]
    assert done.report["steps"] == 36
    told = CliRunner().invoke(app, ["export", str(saved), str(exported), "--to", "torch"])
    assert told.exit_code == 0, told.output
    last = torch.load(out)
    model = in_torchrec_alone(name, exported, last["model"])
    numbers, features, _ = example().Clicks(7200).__getitems__(range(64))
    with torch.no_grad():
        predicted = model(numbers, features)
    assert predicted.shape == (64, 1)
    assert predicted.view(torch.int32).tolist() == last["predicted"].view(torch.int32).tolist()


# ------------------------------------------------------------------ where bits are the same


def pooled_by_both(
    dim: int, pooling: Pooling, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bags of 0 to 300 ids, by our kernel and by TorchRec."""
    rows, lengths = torch.randn(500, dim), torch.arange(0, 301, 6)
    ids = torch.randint(0, 500, (int(lengths.sum()),))
    if weights is not None:
        weights = weights[: len(ids)]
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=500,
        embedding_dim=dim,
        feature_names=["f"],
        pooling=PoolingType.MEAN if pooling == Pooling.MEAN else PoolingType.SUM,
    )
    theirs = EmbeddingBagCollection(tables=[config], is_weighted=weights is not None)
    theirs.load_state_dict({"embedding_bags.t.weight": rows})
    with torch.no_grad():
        expected = theirs(KeyedJaggedTensor(["f"], ids, weights, lengths)).values()
    found = torch.empty(len(lengths), dim)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    column = PooledFeatures(torch.tensor([pooling]).numpy(), torch.tensor([0]).numpy())
    of_ids = None if weights is None else weights.numpy()
    kernels.pool(rows.numpy(), ids.numpy(), offsets.numpy(), of_ids, column, found.numpy())
    return found, expected


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
@pytest.mark.parametrize("dim", [1, 3, 16, 17, 128])
def test_their_sums_and_means_are_ours(dim: int, pooling: Pooling) -> None:
    """They begin with zero and we with the first row, so a zero may have another sign."""
    found, expected = pooled_by_both(dim, pooling)
    assert torch.equal(found, expected)


def test_weighted_sums_are_rounded_once_by_them_and_twice_by_us() -> None:
    """They multiply and add in one operation where the CPU can; so these are close, not equal."""
    found, expected = pooled_by_both(16, Pooling.WEIGHTED, torch.randn(10_000))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
