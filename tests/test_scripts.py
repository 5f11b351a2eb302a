"""What a script may not do before its first batch, and what its trainers must agree on: it gets a
sentence, and nothing is trained."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cluster_jobs import wait_until
from torch import nn

from planaria.cluster.script import HELD_LINES, Script
from planaria.cluster.scripts import Scripts, environment_of, job_of
from planaria.config import Config
from planaria.errors import (
    ArgumentError,
    ClusterError,
    ConfigError,
    DataError,
    OutsideJob,
    StateError,
)
from planaria.torch import (
    Adagrad,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Job,
    KeyedJaggedTensor,
    connect,
)
from planaria.trainer.declaring import (
    MOST_BYTES,
    SOCKET,
    Declaration,
    Refusal,
    Settings,
    decode,
    difference,
)

pytestmark = pytest.mark.torch

ENOUGH = "a test has seen enough"


class Line:
    """A script's socket, whose other end has refused it already; what it declares can be read."""

    def __init__(self) -> None:
        self.theirs, self.ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.send(msgspec.json.encode(Refusal(ENOUGH)))

    def declared(self) -> Declaration:
        said = decode(self.ours.recv(MOST_BYTES))
        assert isinstance(said, Declaration)
        return said


@pytest.fixture
def line() -> Iterator[Line]:
    gc.collect()  # collections of other tests are no longer there
    line = Line()
    with line.ours, line.theirs:
        yield line


@pytest.fixture
def job(line: Line) -> Job:
    return Job(Config.load(None, ["trainers=1"]), line.theirs)


class Ids(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> int:
        return self.ids[at]


def bags(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["user"], torch.tensor(ids), lengths=torch.ones(len(ids)).long())


def users(rows: int = 10) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(rows, 4, "users", ["user"])])


def first_batch(job: Job, *ids: int, **more: Any) -> Any:
    return next(iter(job.batches(Ids(*ids), 2, collate_fn=bags, **more)))


# ------------------------------------------------------------------ before the first batch


def test_forward_outside_a_job_says_what_is_missing() -> None:
    with pytest.raises(OutsideJob, match=r"outside a job.* rows of users; .*connect\(\)"):
        users()(bags([1]))


def test_forward_before_the_first_batch_says_so(job: Job) -> None:
    model = users()
    with pytest.raises(OutsideJob, match="forward outside a job"):
        model(bags([1]))
    with pytest.raises(ConfigError, match=ENOUGH):
        first_batch(job, 1, 2)
    with pytest.raises(OutsideJob, match="it needs a batch; use it in the loop"):
        model(bags([1]))


@pytest.mark.parametrize("what", ["accumulate", "evaluate"])
def test_blocks_of_a_step_need_one(job: Job, what: str) -> None:
    with pytest.raises(OutsideJob, match=f"{what} outside a step"), getattr(job, what)():
        pass


def test_an_id_that_is_not_in_its_table_may_be_mapped_to_a_row_by_the_loop(
    job: Job, line: Line
) -> None:
    """Forward refuses it, if it gets there: see test_looking_ahead.py and misuse.py."""
    kept = users()
    with pytest.raises(ConfigError, match=ENOUGH):
        first_batch(job, 3, 17)
    assert line.declared().ids == 0  # how many are looked up is not known before
    del kept


def test_a_job_needs_a_collection(job: Job) -> None:
    with pytest.raises(OutsideJob, match="make the model first"):
        first_batch(job, 1, 2)


def test_a_dataset_that_is_too_short_is_refused(job: Job, line: Line) -> None:
    kept = users()
    with pytest.raises(DataError, match=r"has 1 samples, but a step needs 2"):
        first_batch(job, 1)
    del kept


def test_what_has_no_state_cannot_be_kept(job: Job) -> None:
    with pytest.raises(StateError, match=r"rate is a float without state_dict\(\)"):
        job.keep(rate=0.1)


def test_a_name_is_kept_once(job: Job) -> None:
    job.keep(model=nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="model is kept already"):
        job.keep(model=nn.Linear(1, 1))


def test_an_optimizer_is_kept_together_with_what_it_changes(job: Job) -> None:
    """Its parameters would differ from trainer to trainer, and be new ones after a failure."""
    model, tables = nn.Linear(1, 1), users()
    job.keep(optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(StateError, match="optimizer changes parameters of no module that is kept"):
        first_batch(job, 1, 2)
    del tables


def test_saving_needs_a_folder(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"save: there is nowhere to save to.*checkpoint\.path"):
        job.save()


def test_connect_and_the_command_agree_on_the_number_of_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SOCKET, "3")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"the script wants 3, but 2 run it.*--set trainers=3"):
        connect(trainers=3)


def test_a_script_that_is_refused_says_why(job: Job) -> None:
    kept = users()
    with pytest.raises(ConfigError, match=ENOUGH):
        first_batch(job, 1, 2)
    del kept


# ------------------------------------------------------------------ what is declared


def test_a_declaration_is_a_job_with_the_tables_steps_and_sizes_of_the_script(
    job: Job, line: Line
) -> None:
    model, single = nn.Linear(4, 3), EmbeddingBag(7, 2, optimizer=Adagrad(lr=0.5))
    tables = users(20)
    job.keep(model=model)
    with pytest.raises(ConfigError, match=ENOUGH):
        first_batch(job, 1, 2, 1, 4, 5, epochs=3)
    declared = line.declared()
    config = Config.from_dict(job_of(declared))
    assert [(one.name, one.rows, one.dim) for one in config.tables] == [
        ("embedding_bag_0", 7, 2),
        ("users", 20, 4),
    ]
    assert (config.steps, config.batch) == (6, 2)
    # Whether each parameter has a gradient, and marks: of their order, the model, the optimizer.
    assert declared.parameters == 15 + 2 + 3 * 3
    assert declared.ids == 2
    del single, tables


def test_a_thousand_tables_can_be_declared(job: Job, line: Line) -> None:
    names = [f"a_table_with_a_rather_long_name_{number}" for number in range(1000)]
    optimizer = Adagrad(lr=0.1)
    made = EmbeddingBagCollection(
        [EmbeddingBagConfig(10, 4, name, [name]) for name in names], optimizer=optimizer
    )
    with pytest.raises(ConfigError, match=ENOUGH):
        next(iter(job.batches(Ids(1, 2), 2)))
    assert len(line.declared().tables) == 1000
    del made


def made_by(job: Job, line: Line, seed: int) -> Declaration:
    torch.manual_seed(seed)
    tables, model = users(), nn.Linear(2, 2)
    job.keep(model=model)
    with pytest.raises(ConfigError, match=ENOUGH):
        first_batch(job, 1, 2)
    del tables
    return line.declared()


def test_trainers_that_start_from_other_values_disagree_and_spares_may(
    job: Job, line: Line
) -> None:
    one = made_by(job, line, 1)
    other = Line()
    with other.ours, other.theirs:
        two = made_by(Job(job.config, other.theirs), other, 2)
    assert "call torch.manual_seed()" in difference(one, two, begins=True)
    assert difference(one, two) == ""
    assert difference(one, one, begins=True) == ""


# ------------------------------------------------------------------ processes

# It declares what a user's script would, in a fraction of the time.
DECLARES = """
import os, socket, sys
from planaria.config import Config
from planaria.trainer.declaring import SOCKET, Declaration, encode
rank = int(os.environ["RANK"])
whole = dict(config=Config.load(None, ["trainers=2"]).to_dict(), steps=5, batch=8, ids=1,
    tables=[dict(name="t", rows=9, dim=4)], parameters=3, kept="all", state="first")
if rank == 1 and len(sys.argv) > 1:
    whole[sys.argv[1]] = {"tables": [], "kept": "less", "state": "other", "steps": 6}[sys.argv[1]]
line = socket.socket(fileno=int(os.environ[SOCKET]))
line.send(encode(Declaration(**whole)))
line.recv(1 << 20)
"""


def scripts(folder: Path, text: str, *words: str, trainers: int = 2) -> tuple[Scripts, list[str]]:
    path, said = folder / "script.py", []  # type: Path, list[str]
    path.write_text(text)
    config = Config.load(None, [f"trainers={trainers}"])
    variables = environment_of(config, Settings(None, []))
    return Scripts([str(path), *words], trainers, 0, variables, said.append), said


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("tables", "ranks 0 and 1 of the script disagree about the tables"),
        ("kept", "disagree about what is kept: names, shapes or types"),
        ("state", "disagree about the values that training starts with"),
        ("steps", "disagree about the number of steps"),
    ],
)
def test_ranks_that_disagree_are_told_about_what(tmp_path: Path, what: str, sentence: str) -> None:
    trainers, _ = scripts(tmp_path, DECLARES, what)
    with trainers, pytest.raises(ClusterError, match=sentence):
        trainers.declare()


def test_ranks_that_agree_declare_one_job(tmp_path: Path) -> None:
    trainers, _ = scripts(tmp_path, DECLARES)
    with trainers:
        assert trainers.declare().steps == 5


def test_a_script_without_a_loop_gets_a_sentence_and_what_it_printed_is_shown(
    tmp_path: Path,
) -> None:
    trainers, said = scripts(tmp_path, "print('all done')", trainers=1)
    with trainers, pytest.raises(ClusterError, match=r"rank 0 of .*script\.py ended before its fi"):
        trainers.declare()
    assert said == ["all done"]


def test_a_script_that_fails_before_its_loop_shows_its_traceback_once(tmp_path: Path) -> None:
    trainers, said = scripts(tmp_path, "import nothing_of_this_name")
    with trainers, pytest.raises(ClusterError, match="before its first batch"):
        trainers.declare()
    text = "\n".join(said)
    assert text.count("ModuleNotFoundError") == 1
    assert text.count("Traceback") == 1
    assert "planaria" not in text.replace(str(tmp_path), "")


def test_a_spare_that_disagrees_is_told_and_is_not_placed(tmp_path: Path) -> None:
    text = DECLARES.replace("rank == 1", "rank == -1")
    trainers, _ = scripts(tmp_path, text, "tables", trainers=1)
    trainers.spares = 1
    said: list[str] = []
    trainers.say = said.append
    with trainers:
        trainers.declare()
        while not said:
            trainers.tend()
    assert said == ["a spare trainer ended with code 0 before it was needed"]


def test_a_spare_that_cannot_be_started_is_told_once_tried_again_and_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lack of descriptors at that moment ended the job."""
    trainers, said = scripts(tmp_path, DECLARES, trainers=1)
    monkeypatch.setattr("planaria.cluster.scripts.SPARE_AGAIN_S", 0.0)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    with trainers:
        trainers.declare()
        trainers.spares = 2
        open_before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            for _ in range(3):
                trainers.tend()
        gc.disable()
        assert len(os.listdir("/proc/self/fd")) == open_before
        gc.enable()
        assert said == [
            "a spare trainer could not be started: [Errno 11] Resource temporarily unavailable"
        ]
        trainers.tend()
        assert len(trainers._waiting) == 2


# ------------------------------------------------------------------ what they print and start

FLOODS = """
import threading
def flood():
    while True:
        print("x" * 100)
threading.Thread(target=flood, daemon=True).start()
"""


def test_a_script_that_prints_faster_than_it_is_shown_is_held_back(tmp_path: Path) -> None:
    """Its supervisor did nothing but print, held gigabytes, and went on when the job was over."""
    trainers, said = scripts(tmp_path, FLOODS + DECLARES, trainers=1)

    def say(line: str) -> None:
        time.sleep(0.001)
        said.append(line)
        assert len(said) < 10 * HELD_LINES, "nothing but printing is done"

    trainers.say = say
    with trainers:
        trainers.declare()
        [script] = trainers._waiting
        assert wait_until(lambda: len(script.lines) >= HELD_LINES, 10.0)
        time.sleep(0.2)
        assert len(script.lines) <= HELD_LINES
        trainers.tend()


def test_no_line_of_many_is_lost_on_the_screen_or_in_the_log(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(3 * HELD_LINES)]
    text = f"for number in range({len(lines)}): print('line', number)"
    trainers, said = scripts(tmp_path, text, trainers=1)
    with trainers:
        trainers._waiting[0].give(Refusal(ENOUGH), tmp_path / "log")
        with pytest.raises(ClusterError, match="ended before its first batch"):
            trainers.declare()
    assert said == lines
    assert (tmp_path / "log").read_text().splitlines() == lines


STARTS_ANOTHER = """
import subprocess
print(subprocess.Popen(["sleep", "291"]).pid)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("end", ["exits", "is killed", "is ended"])
def test_what_a_script_has_started_ends_with_it(tmp_path: Path, end: str) -> None:
    text = STARTS_ANOTHER + ("" if end == "exits" else "import time; time.sleep(200)")
    trainers, said = scripts(tmp_path, text, trainers=1)
    with trainers:
        [script] = trainers._waiting
        assert wait_until(lambda: trainers.show() or bool(said), 20.0)  # type: ignore[func-returns-value]
        if end == "is killed":
            os.kill(script.pid, signal.SIGKILL)
        if end != "is ended":
            script.wait()
    assert wait_until(lambda: not is_running(int(said[0])), 5.0)


def test_signals_after_the_end_reach_nobody(tmp_path: Path) -> None:
    script = Script([str(tmp_path / "none.py")], {**os.environ}, 0, 1)
    assert script.wait() != 0
    script.send_signal(signal.SIGKILL)
    script.close()
