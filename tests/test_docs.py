"""Every snippet of README.md and docs/*.md works: Python runs, commands are held to the real CLI.

A command is parsed with the options of today, and its configuration, failures and inputs go
through the same door as in earnest. Where that takes seconds it also runs, as a smaller job. The
files that pages speak of are there: job.yaml is the example of docs/config.md, and train.py that of
docs/own-model.md.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from planaria.cli import app
from planaria.comparing import Emulation
from planaria.comparing.command import DEFAULT
from planaria.comparing.runs import prepare
from planaria.config import Config
from planaria.planning import PlanInputs, read_trace
from planaria.schedule import Fault, parse_freeze, parse_kill, resolve
from planaria.simulator.__main__ import arguments as simulator_arguments

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]
SMALLER = ["servers=4", "batch=32", "model.rows=100", "model.tables=3", "data.test_samples=200"]
LIMIT_S = 120


def snippets(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """The words of each command, without comments; lines that end in a backslash go on."""
    blocks = [block.replace("\\\n", " ") for block in snippets(page, "sh")]
    found = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words for words in found if words]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader would stand: with a job, a trace and a few clicks."""
    (tmp_path / "job.yaml").write_text(snippets("docs/config.md", "yaml")[0])
    (tmp_path / "train.py").write_text(snippets("docs/own-model.md", "python")[0])
    failures = [{"server": n % 7, "time_hours": 30 * n + n * n % 11} for n in range(40)]
    (tmp_path / "failures.json").write_text(json.dumps(failures))
    (tmp_path / "clicks.csv").write_text("click,user\n1,a\n0,b\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


# ------------------------------------------------------------------------ commands


def check(words: Sequence[str], folder: Path) -> None:
    """Raises whatever the command would end with before it starts, and runs it if that is short."""
    program = words[0].removeprefix(".venv/bin/")
    if program == "planaria":
        check_planaria(words[1], words[2:])
        if extra := extra_options(words[1:]):
            run([sys.executable, "-m", "planaria", *words[1:], *extra], folder)
    elif program == "make":
        run(["make", "-n", "-C", str(ROOT), *words[1:]], folder)
    elif program == "python" and words[1:3] == ["-m", "planaria.simulator"]:
        simulator_arguments().parse_args(words[3:])
        if "--seed" in words:
            run([sys.executable, *words[1:]], folder)
    else:
        raise ValueError(f"no test knows how to try {shlex.join(words)}")


def check_planaria(name: str, options: Sequence[str]) -> None:
    group: Any = typer.main.get_command(app)
    command = group.commands[name]
    if hasattr(command, "commands"):  # of commands of its own
        command, options = command.commands[options[0]], options[1:]
    given = command.make_context(name, list(options)).params
    given = {name: value for name, value in given.items() if value not in (None, (), [])}
    if name == "plan":
        inputs = {field.name for field in fields(PlanInputs)}
        PlanInputs(**{key: value for key, value in given.items() if key in inputs}).check()
        if "trace" in given:
            read_trace(Path(given["trace"]))
        if "job" in given:
            Config.load(Path(given["job"]))
    elif name in ("train", "run", "drill", "compare"):
        file = given.get("config")
        job = Config.load(file and Path(file), given.get("sets", ()))
        events: list[Fault] = [parse_kill(text) for text in given.get("kill", ())]
        events += [parse_freeze(text) for text in given.get("freeze", ())]
        resolve(events, job)
        if name == "run" and not Path(given["script"]).is_file():
            raise FileNotFoundError(given["script"])
        if name == "compare":
            emulated = {field.name for field in fields(Emulation)}
            emulation = Emulation(**{key: given[key] for key in given.keys() & emulated})
            prepare(emulation, job, given.get("strategy", DEFAULT))


def extra_options(words: Sequence[str]) -> list[str]:
    """What makes a command short enough to run it; nothing if there is no way."""
    name, *options = words
    if name == "plan" and "--measure" not in options:
        return ["--runs", "5"]
    if name == "data":
        return ["--label", "click"] if "--write" in options else []
    waits = {"job.yaml", "--resume", "--on"} & {*options}  # for files, or for other machines
    if name == "train" and not waits:
        return [f"--set={pair}" for pair in SMALLER]
    return []


@pytest.mark.parametrize(
    ("page", "words"),
    [(page, words) for page in PAGES for words in commands(page)],
    ids=lambda value: value if isinstance(value, str) else shlex.join(value)[:60],
)
def test_every_command_of_the_pages_works(page: str, words: list[str], folder: Path) -> None:
    check(words, folder)


def test_there_are_commands_and_python_on_the_pages() -> None:
    assert len([words for page in PAGES for words in commands(page)]) >= 15
    assert len([code for page in PAGES for code in snippets(page, "python")]) >= 8


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("planaria train --no-such-option", "No such option"),
        ("planaria no-such-command", "no-such-command"),
        ("planaria train --set stepz=3", "did you mean steps?"),
        ("planaria train no-such.yaml", "no-such.yaml"),
        ("planaria drill --kill server:77@1", "expected server:0 to server:5"),
        ("planaria run no-such.py", "no-such.py"),
        ("planaria plan --servers 0", "--servers"),
        ("planaria plan --trace no-such.json", "no-such.json"),
        ("planaria compare --strategy magic", "magic"),
        ("planaria compare --lost 7", "--lost"),
        ("make no-such-target", "no-such-target"),
        ("python -m planaria.simulator --no-such-option", "2"),
        ("curl example.org", "no test knows"),
    ],
)
def test_a_command_that_does_not_work_is_noticed(line: str, error: str, folder: Path) -> None:
    with pytest.raises((Exception, SystemExit), match=re.escape(error)) as raised:
        check(shlex.split(line), folder)
    assert not isinstance(raised.value, subprocess.TimeoutExpired)


# ------------------------------------------------------------------------ Python


@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page in PAGES for n in range(len(snippets(page, "python")))]
)
def test_every_snippet_of_the_pages_runs(page: str, number: int, folder: Path) -> None:
    run([sys.executable, "-c", snippets(page, "python")[number]], folder)
