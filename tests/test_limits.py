"""How large messages can be: none that a job sends is refused; and whose code a job runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_jobs import TINY, BeatenRun, Blow, leaving_nothing, tiny, undisturbed
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria import kernels
from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent
from planaria.cluster.files import SHARED, JobFiles, _held, forget_old
from planaria.cluster.node import limits_of
from planaria.config import Config
from planaria.data import Synthetic, sample_range
from planaria.server.decoding import find_mates
from planaria.server.store import Store
from planaria.trainer.dense import DenseState, dlrm_layers
from planaria.trainer.routing import Router
from planaria.wire import limits as module
from planaria.wire.codec import encode
from planaria.wire.control import CoordinatorState, SaveState, ServerHolds, StepDone
from planaria.wire.limits import PEEKED_AT_ONCE, Limits
from planaria.wire.messages import (
    NO_VIEW,
    Answer,
    Delta,
    DenseCopy,
    DenseGradient,
    DenseSum,
    Early,
    Hello,
    Install,
    Lookup,
    MatePeek,
    MateReply,
    MateRequest,
    Message,
    Push,
)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what is added to be generous."""
    monkeypatch.setattr(module, "GENEROSITY", 1)
    monkeypatch.setattr(module, "SMALLEST_ARRAYS", 0)


CONFIGS = st.builds(
    lambda servers, tables, rows, batch, trainers, test, chunk, name, parity: tiny(
        f"servers={servers}",
        f"parity={parity}",
        f"model.tables={tables}",
        f"model.rows={rows}",
        f"batch={max(batch, trainers)}",
        f"trainers={trainers}",
        f"data.test_samples={test}",
        f"rebuild.chunk={chunk}",
        f"optimizer.name={name}",
        "data.zipf=0",
    ),
    st.integers(3, 7),
    st.integers(1, 4),
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(0, 90),
    st.integers(1, 50),
    st.sampled_from(["sgd", "adam", "adagrad", "rowwise_adagrad"]),
    st.sampled_from([0, 1, 2]),
)


def legal_messages(config: Config) -> Iterator[Message]:
    """The messages of a step, of the evaluation, and of the rebuilding of what these want."""
    (arena,) = config.arenas
    layout = config.layout.arena(arena.rows)
    router = Router(layout)
    source = Synthetic(config.model.table_rows, seed=1, exponent=config.data.zipf)
    dim = config.model.dim
    contributions: dict[int, list[Any]] = {place: [] for place in range(config.servers)}
    for samples in (config.batch, config.data.test_samples):
        for rank in range(config.trainers):
            batch = source.read(*sample_range(1, rank, config.trainers, samples))
            unique, _ = kernels.dedup((batch.ids + arena.first_rows).ravel())
            parts = router.partition(unique)
            ends = np.cumsum(parts.counts)
            for place, index in enumerate(np.split(parts.indices, ends[:-1])):
                weights = np.ones((len(index), dim), np.float32)
                common: dict[str, Any] = {"view": NO_VIEW, "step": 1}
                yield Lookup(**common, rank=rank, part=0, indices=[index])
                bits = np.packbits(np.ones(len(index), np.bool_))
                both: dict[str, Any] = {"place": place, "part": 0, "weights": [weights]}
                yield Answer(**common, **both, protected=0, whole=True, which=[bits])
                yield Early(**common, **both, which=[bits])
                if samples == config.batch:
                    yield Push(**common, rank=rank, indices=[index], gradients=[weights], lrs=[0.1])
                    contributions[place].append((index, weights))
                if config.r:
                    yield from rebuilding(layout, place, index, arena.words)
    for place in range(config.servers) if config.r else ():
        store = Store([arena], config.layout, place)
        store.apply(1, [contributions[place]], [0.1])
        yield shown(store, 0, min(PEEKED_AT_ONCE * config.rebuild.chunk, layout.slots))
        for deltas in store.parity_deltas(store.own.after(0)[0]).values():
            yield Delta(
                **common,
                place=place,
                indices=[delta.indices for delta in deltas],
                deltas=[delta.delta for delta in deltas],
            )
        swept = np.arange(min(config.rebuild.chunk, layout.records(place)))
        yield from rebuilding(layout, place, swept, arena.words)


def rebuilding(layout: Any, place: int, index: Any, words: int) -> Iterator[Message]:
    mates = find_mates(layout, place, index)
    for other in np.unique(mates.places):
        asked = mates.indices[mates.places == other]
        records = np.zeros((len(asked), words), np.uint32)
        yield MateRequest(view=NO_VIEW, request=1, arena=0, as_of=0, indices=asked)
        yield MateReply(
            view=NO_VIEW, request=1, place=0, status="value", committed=0, records=records
        )


def shown(store: Store, first: int, stop: int) -> MatePeek:
    """What a mate says of records that others read, after the first step."""
    parts = store.changes_after(0, first, stop, as_of=0)
    return MatePeek(
        view=NO_VIEW,
        request=1,
        place=store.place,
        **dict.fromkeys(("process", "at", "counter", "key", "count"), 1),
        ends=np.cumsum([len(index) for index, _ in parts]).tolist(),
        indices=np.concatenate([np.empty(0, np.int64), *(index for index, _ in parts)]),
        deltas=np.concatenate(
            [np.empty((0, store.arenas[0].arena.words), np.uint32), *(d for _, d in parts)]
        ),
    )


@pytest.mark.usefixtures("exact")
@settings(max_examples=60, deadline=None)
@given(config=CONFIGS)
def test_no_message_of_a_legal_step_or_rebuild_is_beyond_the_exact_limits(config: Config) -> None:
    limits = limits_of(config)
    for message in legal_messages(config):
        encode(b"token", "server-0", "address", message, limits)


@pytest.mark.usefixtures("exact")
def test_the_limits_are_reached_where_every_row_is_touched() -> None:
    """A control: limits far too large would hold as well."""
    config = tiny("batch=20000", "data.test_samples=0", "servers=3", "data.zipf=0", "k=2")
    limits = limits_of(config)
    sizes: dict[type[Message], int] = {}
    for message in legal_messages(config):
        _, _, *arrays = encode(b"token", "", "", message, limits)
        total = sum(array.nbytes for array in arrays)
        sizes[type(message)] = max(sizes.get(type(message), 0), total)
    every = {Lookup, Answer, Early, Push, Delta, MateRequest, MateReply, MatePeek}
    assert every == set(sizes)
    # A range lies in one region, has changed in one step here, and of data, that has one source.
    del sizes[MatePeek]
    for kind, size in sizes.items():
        # A delta goes to one of several holders, and has its share of the rows alone; and there is
        # room for what a server has when others have left.
        assert size <= limits.of(kind) <= 4 * size, kind


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.usefixtures("exact")
def test_dense_states_and_gradients_fit(name: str) -> None:
    config = tiny(f"optimizer.name={name}", "model.bottom=[100,50]", "batch=1", "model.rows=1")
    model, limits = config.model, limits_of(config)
    layers = dlrm_layers(model.tables, model.dim, model.bottom, model.top)
    state = DenseState(sum(layer.parameters for layer in layers), config.optimizer_rule)
    for message in (
        DenseGradient(view=NO_VIEW, rank=0, step=1, gradient=np.zeros_like(state.weights)),
        DenseSum(view=NO_VIEW, part=0, step=1, gradient=np.zeros_like(state.weights)),
        DenseCopy(view=NO_VIEW, step=1, state=state.export()),
    ):
        encode(b"token", "trainer-0", "", message, limits)


def test_the_install_of_the_largest_job_fits() -> None:
    config = tiny("servers=1024", "trainers=1024", "spares=1024", "batch=1024", "k=4")
    servers, trainers = ([f"{role}-{n}" for n in range(1024)] for role in ("server", "trainer"))
    addresses = dict.fromkeys(servers + trainers, "tcp://" + "h" * 253 + ":65535")
    install = Install(
        view=NO_VIEW,
        committed=0,
        servers=servers,
        trainers=trainers,
        rebuilding=list(range(1024)),
        addresses=addresses,
    )
    saves = SaveState(owner="one", number=1, state=CoordinatorState(1, 1, install))
    for message in (install, saves):
        encode(b"token", "coordinator-0", "", message, limits_of(config))


def test_a_kind_that_nobody_listed_gets_what_the_largest_gets() -> None:
    limits = limits_of(tiny())
    assert limits.of(Hello) == max(limits.arrays.values()) <= limits.largest
    assert Limits().of(Hello) == Limits().other


# ---------------------------------------------------------------------------- real processes


@pytest.fixture
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


@pytest.mark.torch
@pytest.mark.usefixtures("folder")
def test_a_job_with_large_messages_and_a_kill_refuses_none_of_them() -> None:
    large = ("batch=2048", "model.rows=20000", "model.dim=32", "data.zipf=0", "steps=12")
    limits = limits_of(tiny(*large, "servers=3", "parity=1"))
    assert limits.of(Push) > 2 * module.SMALLEST_ARRAYS  # a control: the job's own limits hold
    run = BeatenRun(tiny(*large, "servers=3", "parity=1"), [Blow(4, ("server:1",))])
    assert run.run()["digest"] == undisturbed(*large)
    assert run.killed == run.struck
    assert [holds.refused for _, holds in run.of(ServerHolds)] == [0, 0, 0]


@pytest.mark.torch
def test_a_jobs_folder_and_sockets_are_its_owners_alone(folder: Path) -> None:
    modes: dict[str, int] = {}

    def look(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, StepDone) and not modes:
            modes["folder"] = processes.folder.stat().st_mode & 0o777
            for path in processes.folder.glob("*.ipc"):
                modes[path.name] = path.stat().st_mode & 0o777

    BeatenRun(tiny("servers=3", "parity=1", "steps=5"), on_event=look).run()
    assert modes.pop("folder") == 0o700
    assert len(modes) >= 5
    assert set(modes.values()) == {0o600}


def test_a_folder_that_another_is_just_making_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven commands started at once on one machine: one took the files of another, between its two
    looks at them.
    """
    files = JobFiles(tmp_path / "made")
    (files.folder / "logs").mkdir(parents=True)
    look = JobFiles.running

    def running(self: JobFiles) -> bool:
        found = look(self)
        if not (self.folder / "supervisor").exists():
            self.fill(dict.fromkeys(SHARED, b"x"))
        return found

    monkeypatch.setattr(JobFiles, "running", running)
    forget_old(tmp_path)
    assert (files.folder / "keys").exists()
    monkeypatch.undo()
    os.close(_held.pop(files.folder))
    forget_old(tmp_path)
    assert not (files.folder / "keys").exists()


@pytest.mark.torch
def test_a_file_named_like_a_library_in_the_users_folder_is_not_run(tmp_path: Path) -> None:
    for name in ("msgspec", "zmq", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')\nraise OSError")
    command = [sys.executable, "-P", "-m", "planaria", "train"]
    for pair in (*TINY, "servers=3", "parity=1", "steps=5"):
        command += ["--set", pair]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    ran = sorted(path.name for path in tmp_path.iterdir() if not path.suffix)
    assert ran == [], done.stderr
    assert done.returncode == 0, done.stderr
    control = subprocess.run(
        [sys.executable, "-m", "planaria", "train", "--help"],
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, "PYTHONSAFEPATH": ""},
        check=False,
    )
    assert control.returncode != 0  # a control: they would be found
