"""What a server takes up again of what was saved, without any process: its own job's, or step 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_saving import Line, config, hear, save_all, save_dense, saved_by_all

from planaria import Store
from planaria.checkpoints import Checkpoint
from planaria.cluster.files import Beginning
from planaria.cluster.parts import read_dense, reload_records, restore_records
from planaria.control.saving import SaveMachine
from planaria.errors import CheckpointError
from planaria.tables import make_arenas


def test_what_another_job_has_saved_is_not_restored(tmp_path: Path) -> None:
    job = config(tmp_path)
    saves = SaveMachine(job, 0, 0.0)
    hear(saves, saved_by_all(job, 5))
    arenas = make_arenas(job.tables, job.optimizer_rule)
    store = Store(arenas, job.layout, 0, blank_at=5)
    with pytest.raises(CheckpointError, match=r"was saved by job .*, and this is another-job"):
        restore_records(job, "another-job", 5, store)
    assert store.invalid_records == len(store.arenas[0].records)
    with pytest.raises(CheckpointError, match="of its own"):
        read_dense(job, "another-job", 5)


def test_a_reload_takes_the_newest_save_that_is_not_ahead_and_tells_its_progress(
    tmp_path: Path,
) -> None:
    """A server that reloads for minutes shows that it is alive."""
    job, line = config(tmp_path, "strategy=cpr"), Line()
    made = save_all(job, 5, line)
    save_dense(job, 5, line)
    saves = SaveMachine(job, 0, 0.0)
    hear(saves, line)
    hear(saves, saved_by_all(job, 10))
    arenas, calls = make_arenas(job.tables, job.optimizer_rule), list[int]()
    store = Store(arenas, job.layout, 1, blank_at=7)
    beginning = Beginning(Checkpoint(tmp_path, 5).job)
    assert reload_records(job, beginning, store, lambda: calls.append(1)) == 5
    assert (store.invalid_records, store.digest()) == (0, made[1].digest())
    assert calls


def test_a_reload_without_a_save_makes_the_records_of_step_0_and_tells_its_progress(
    tmp_path: Path,
) -> None:
    job = config(tmp_path, "strategy=cpr")
    arenas, calls = make_arenas(job.tables, job.optimizer_rule), list[int]()
    store = Store(arenas, job.layout, 1, seed=3, blank_at=7)
    assert reload_records(job, Beginning("a-job"), store, lambda: calls.append(1)) == 0
    fresh = Store(arenas, job.layout, 1, seed=3)
    assert (store.invalid_records, store.digest()) == (0, fresh.digest())
    assert calls
