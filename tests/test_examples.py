"""The examples run, and say what they are meant to say."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parent.parent / "examples"
OWN, PLAIN = EXAMPLES / "own_loop.py", EXAMPLES / "own_loop_plain.py"
LIMIT_S = 240  # of a busy machine; half a minute otherwise


def code_of(text: str) -> list[str]:
    """The lines of a program, one for each statement or header, without docstrings and comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


def lines_that_differ(one: str, other: str) -> int:
    """A line that became another one counts once."""
    first, second = code_of(one), code_of(other)
    codes = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in codes if kind != "equal")


def final_loss(*command: str | Path) -> float:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [loss] = re.findall(r"mean loss of the last 50 steps: (\d\.\d+)", done.stdout)
    return float(loss)


def test_a_loop_of_ones_own_takes_five_lines_at_most() -> None:
    own, plain = OWN.read_text(), PLAIN.read_text()
    assert 1 <= lines_that_differ(own, plain) <= 5
    assert lines_that_differ(own, own) == 0


def test_lines_that_differ_are_counted_and_prose_is_not() -> None:
    assert lines_that_differ('"""One."""\na = 1\nb = 2  # two\n', "a = 1\nb = 2\n") == 0
    assert lines_that_differ("a = 1\nb = 2\n", "a = 1\nb = 3\nc = 4\n") == 2


def test_both_loops_learn_the_same_although_a_server_is_killed() -> None:
    """The tables begin with other random numbers, so the losses are close and not equal."""
    job = ["--set=trainers=1", "--set=servers=3", "--kill=server:any@100"]
    plain = final_loss(PLAIN)
    own = final_loss("-m", "planaria", "run", *job, OWN)
    assert plain < 0.4  # guessing costs 0.69
    assert abs(own - plain) < 0.08
