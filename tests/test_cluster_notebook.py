"""The notebook among the examples runs, in a kernel as a user's, and leaves no process behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from cluster_jobs import leaving_nothing, processes_of, wait_until
from nbclient import NotebookClient

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # of Jupyter

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"
LIMIT_S = 240  # for a cell, on a busy machine


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def is_server(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().startswith("server-")


def printed(run: Any) -> str:
    outputs = [one for cell in run.cells for one in cell.get("outputs", ())]
    return "".join(one["text"] for one in outputs if one["output_type"] == "stream")


def test_it_is_kept_without_what_it_printed() -> None:
    code = [cell for cell in notebook().cells if cell.cell_type == "code"]
    assert len(code) >= 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_it_learns_although_a_server_is_killed_and_its_job_ends_before_its_kernel() -> None:
    run = notebook()
    NotebookClient(run, timeout=LIMIT_S).execute()
    lines = printed(run).splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines if "mean loss" in line]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 0.75  # guessing costs 0.69
    assert any(line.endswith(" is killed") for line in lines)
    assert lines[-1] == "the job ended after step 200; 0 servers are left"


@pytest.mark.campaign
def test_a_kernel_that_is_killed_takes_its_job_along(folder: Path) -> None:
    run = notebook()
    client = NotebookClient(run, timeout=LIMIT_S)
    with client.setup_kernel():
        for number, cell in enumerate(run.cells):
            if "job.finish" in cell.source:
                break
            client.execute_cell(cell, number)
        assert len(processes_of(folder)) >= 4  # three servers and a coordinator
        os.kill(client.km.provisioner.pid, signal.SIGKILL)
        assert wait_until(lambda: processes_of(folder) == [], 10.0)


@pytest.mark.campaign
def test_its_cells_can_be_run_again_in_the_same_kernel(folder: Path) -> None:
    """In the middle, so that connect has to end the job of before."""
    run = notebook()
    first = [cell for cell in run.cells if cell.cell_type == "code"][:3]
    client = NotebookClient(run, timeout=LIMIT_S)
    with client.setup_kernel():
        for cell in (*first, *first):
            client.execute_cell(cell, run.cells.index(cell))
        assert len(list((folder / "jobs").iterdir())) == 1
        assert len([pid for pid in processes_of(folder) if is_server(pid)]) == 4  # one is a spare
