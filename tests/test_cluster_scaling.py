"""Servers come and go while real processes train: no bit of the model changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_commands import finished, only_job, planaria, started, whole_steps
from cluster_jobs import BeatenRun, leaving_nothing, tiny, undisturbed
from scaling_jobs import SLOW, Move, ScaledRun, Scaling, scaled_script
from script_jobs import undisturbed_script

from planaria.cluster import asking
from planaria.cluster.resuming import find_start
from planaria.cluster.run import JobRun
from planaria.errors import ClusterError

pytestmark = pytest.mark.torch

SIX = ("servers=6", "k=3", "parity=2", "spares=1", "steps=80")
ENDLESS = "steps=1000000"
FOR_EVER = ("rebuild.bytes_per_s=1", "rebuild.chunk=1")  # a move does not end


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


def check(run: ScaledRun, failed: list[str], digest: str | None = None) -> None:
    assert run.digest == (digest or undisturbed("steps=80"))
    assert run.states == ["done"] * len(run.states)
    assert sorted(run.failed) == sorted(failed), "who retires has not failed"
    assert run.scaling.wrong == 0


def test_the_model_is_that_of_a_job_whose_servers_stay() -> None:
    run = ScaledRun(tiny(*SIX), [Move(10, 8), Move(40, 5)])
    check(run, [])
    assert [len(view.servers) for view in run.scaling.views] == [6, 8, 8, 8, 5]
    assert run.report["servers"] == 5
    parity = run.scaling.scrubbed
    assert len(parity) == 4
    assert parity[1] == parity[3], "a scrub in a move counts every server of the layout after it"


def test_what_cannot_be_is_refused() -> None:
    with started(*SIX, ENDLESS, *FOR_EVER) as job:
        folder = only_job()
        for words, code, sentence in (
            (("scale", "--servers=4"), 1, "keep at least 5"),
            (("drain", "--server=server:9"), 2, "there is no server 'server:9'"),
            (("drain", "--host=elsewhere"), 2, "there is no host 'elsewhere'"),
            (("drain",), 2, "--host or --server"),
            (("drain", "--server=server:0", "--server=server:1"), 1, "keep at least 5"),
            (("scale", "--servers=8", "--deadline=2"), 1, "has not changed within 2 s"),
            (("scale", "--servers=7"), 1, "is changing to 8 servers; wait for that"),
            (("drain", "--server=server:0"), 1, "is changing to 8 servers; wait for that"),
        ):
            done = planaria(words[0], folder.name, *words[1:])
            said = " ".join((done.stdout + done.stderr).split())
            assert (done.returncode, sentence in said) == (code, True), said
        asking.stop(folder)  # while records move
        assert finished(job).code == 130


@pytest.mark.campaign
def test_a_server_is_freed_by_name() -> None:
    with started(*SIX, ENDLESS) as job:
        folder = only_job()
        done = planaria("drain", folder.name, "--server=server:2")
        assert (done.returncode, done.stdout) == (0, f"{folder.name} has 5 servers\n")
        members = [one.member for one in asking.status(folder).processes if one.state == "ready"]
        assert "server-2" not in members
        assert {"server-0", "server-1", "server-3", "server-4", "server-5"} <= {*members}
        assert asking.scrub(folder, 60).wrong == 0
        asking.stop(folder)
        assert finished(job).code == 130


@pytest.mark.campaign
def test_a_job_may_end_while_its_records_move() -> None:
    config = tiny(*SIX, *FOR_EVER)
    scaling = Scaling([Move(10, 8, scrubs=False)], config.steps, holds=False)
    report = BeatenRun(config, observers=[scaling]).run()
    scaling.join()
    assert report["digest"] == undisturbed("steps=80")
    (answer,) = scaling.answers
    assert isinstance(answer, ClusterError)
    assert "has ended" in str(answer)


@pytest.mark.campaign
def test_with_cpr_the_number_of_servers_is_fixed(tmp_path: Path) -> None:
    saves = (f"checkpoint.path={tmp_path / 'saved'}", "checkpoint.every_steps=10")
    run = ScaledRun(tiny("servers=3", "strategy=cpr", "steps=60", *saves), [Move(10, 4)])
    assert run.states == ["refused"]
    assert run.digest == undisturbed("steps=60")


@pytest.mark.campaign
@pytest.mark.parametrize("victim", ["server:7", "server:0", "server:4", "trainer:0", "coordinator"])
def test_a_process_that_dies_while_records_move_changes_no_bit(victim: str) -> None:
    """server:7 comes, and goes in the second move; server:4 is to take over records then."""
    moves = [Move(10, 8, strikes=(victim,)), Move(40, 5, strikes=(victim,))]
    check(ScaledRun(tiny(*SIX, *SLOW), moves), [victim, victim])


@pytest.mark.campaign
def test_two_servers_that_die_in_each_move_and_between_them_change_no_bit() -> None:
    two = ("server:1", "server:6")
    moves = [Move(10, 8, strikes=two, then=("server:3",)), Move(40, 5, strikes=two)]
    check(ScaledRun(tiny(*SIX, *SLOW), moves), [*two, "server:3", *two])


@pytest.mark.campaign
@pytest.mark.parametrize("parity", [0, 1])
def test_with_less_parity_it_is_the_same(parity: int) -> None:
    sets = ["servers=4", f"parity={parity}", "spares=1", "steps=80", *["k=2"][:parity]]
    moves = [Move(10, 6, scrubs=parity > 0), Move(40, 3, ("server:1",), scrubs=parity > 0)]
    check(ScaledRun(tiny(*sets), moves), [])


@pytest.mark.campaign
def test_a_script_is_scaled() -> None:
    sets = ("servers=4", "k=2", "parity=1", "trainers=1")
    run = scaled_script("loop.py", sets=sets, plan=[Move(5, 6), Move(12, 3)])
    check(run, [], undisturbed_script("loop.py"))


@pytest.mark.campaign
@pytest.mark.parametrize("policy", ["full", "intermittent", "consecutive"])
def test_what_is_saved_in_a_move_and_after_it_is_resumed_from(tmp_path: Path, policy: str) -> None:
    saved = tmp_path / "saved"
    saves = ("checkpoint.every_steps=3", f"checkpoint.policy={policy}", "checkpoint.keep_last=99")
    sets = (*SIX, *SLOW, *saves)
    run = ScaledRun(tiny(*sets, f"checkpoint.path={saved}"), [Move(10, 8), Move(40, 5)])
    check(run, [])
    steps = whole_steps(saved)
    assert steps[-1] == 80
    meanwhile = [step for step in steps if step in run.scaling.saved_while_moving]
    after = [step for step in steps if meanwhile and meanwhile[-1] < step < 80]
    for step in sorted({meanwhile[0], meanwhile[-1], after[0], after[-1]}):
        copy = tmp_path / f"from-{step}"
        shutil.copytree(saved, copy)
        for later in whole_steps(copy):
            if later > step:
                shutil.rmtree(next(copy.glob(f"step-*{later}")))
        config = tiny(*sets, f"checkpoint.path={copy}")
        report = JobRun(config, start=find_start(config, resume=True)).run()
        assert report["resumed_from"] == step
        assert report["digest"] == undisturbed("steps=80")
