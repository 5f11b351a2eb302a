"""Models that leave a job and come back into one, through the commands and on real processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_jobs import BeatenRun, Blow, leaving_nothing, tiny, undisturbed
from script_jobs import PATIENT, SCRIPTS, run_script
from script_jobs import PLAIN as PLAIN_SCRIPT
from typer.testing import CliRunner

from planaria.cli import app
from planaria.cluster.resuming import find_start, load_saved
from planaria.cluster.run import JobRun
from planaria.exporting import export, open_model
from planaria.foreign import open_foreign
from planaria.importing import fit, import_model

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

PLAIN = ("strategy=none", "servers=2", "spares=0")  # quick to start


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


def command(*words: object) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.campaign
def test_out_and_in_again_is_as_if_it_had_never_left(tmp_path: Path) -> None:
    JobRun(tiny(*PLAIN, "steps=10", f"checkpoint.path={tmp_path / 'first'}")).run()
    command("export", tmp_path / "first", tmp_path / "model", "--to", "dcp", "--optimizer")
    command("import", tmp_path / "model", tmp_path / "second", "--set", "steps=20")
    job, _ = load_saved([f"checkpoint.path={tmp_path / 'second'}"])
    report = JobRun(job, start=find_start(job, resume=True)).run()
    assert report["resumed_from"] == 10
    assert report["digest"] == undisturbed("steps=20")


@pytest.mark.parametrize("strategy", ["erasure", "checkpoint"])
@pytest.mark.campaign
def test_a_model_from_elsewhere_is_protected_from_its_first_step_on(
    tmp_path: Path, strategy: str
) -> None:
    """Steps too small to change a weight: what is there in the end is what was imported."""
    folder = tmp_path / strategy
    sets = ["servers=3", "steps=8", "optimizer.lr=1e-30", f"strategy={strategy}"]
    saves = [f"checkpoint.path={folder}", "checkpoint.every_steps=1000"]
    config = tiny(*sets, *saves, "failures.reschedule_s=0")
    draw = torch.Generator().manual_seed(1)
    state = {t.name: torch.rand(t.rows, t.dim, generator=draw) + 0.5 for t in config.tables}
    torch.save({f"bags.{name}.weight": rows for name, rows in state.items()}, tmp_path / "stock.pt")
    import_model(fit(open_foreign(tmp_path / "stock.pt"), config), str(folder))
    run = BeatenRun(config, [Blow(3, ("server:1",))], start=find_start(config, resume=True))
    report = run.run()
    assert len(run.struck) == 1
    assert [back["to_step"] for back in report["rollbacks"]] == (
        [0] if strategy == "checkpoint" else []
    )
    export(open_model(folder), tmp_path / "out", to="torch")
    found = torch.load(tmp_path / "out/tables.pt", weights_only=True)
    for name, rows in state.items():
        assert torch.equal(found[f"embedding_bags.{name}.weight"], rows)


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


@pytest.mark.campaign
def test_a_script_goes_on_with_what_it_kept_and_with_tables_of_others(tmp_path: Path) -> None:
    sets = (*PLAIN_SCRIPT, "trainers=1")
    first = run_script(tmp_path, "rows.py", sets=(*sets, f"checkpoint.path={tmp_path / 'first'}"))
    assert first.code == 0, first.error
    command("export", tmp_path / "first", tmp_path / "model", "--to", "torch")
    rows = torch.load(tmp_path / "model/tables.pt", weights_only=True)["embedding_bags.item.weight"]
    kept = torch.load(tmp_path / "model/kept.pt", weights_only=True)
    assert kept["top"].keys() == {"weight", "bias"}
    command("import", tmp_path / "model", tmp_path / "second")
    in_second = (*sets, f"checkpoint.path={tmp_path / 'second'}")
    second = run_script(tmp_path, "rows.py", sets=in_second, options=["--resume"])
    assert second.code == 0, second.error
    line = f"after step 0 item {digest(rows)} top {digest(kept['top']['weight'])}"
    assert line in second.out

    torch.save({"model": {"item.weight": torch.ones(60, 8)}}, tmp_path / "stock.pt")
    pairs = [word for pair in (*PATIENT, *sets) for word in ("--set", pair)]
    script = f"'{SCRIPTS / 'rows.py'}'"
    said = command("import", tmp_path / "stock.pt", tmp_path / "third", "--script", script, *pairs)
    assert "the dense part is the script's own" in said
    in_third = (*sets, f"checkpoint.path={tmp_path / 'third'}")
    third = run_script(tmp_path, "rows.py", sets=in_third, options=["--resume"])
    assert third.code == 0, third.error
    assert f"after step 0 item {digest(np.ones((60, 8), np.float32))}" in third.out
    assert third.out.split(" top ")[1][:16] == first.out.split(" top ")[1][:16]
