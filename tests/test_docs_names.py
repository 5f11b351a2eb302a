"""What stands in backticks on the pages and looks like code is there, in the code of today.

| kind | such as | must be |
| --- | --- | --- |
| command | `planaria plan JOB.yaml`, `make bench`, `python -m benchmarks.cluster` | a command, with options that it has |
| option | `--kill WHO@STEP` | an option of some command |
| path | `cluster/run.py`, `simulator/` | a file or folder of the project |
| dotted | `checkpoint.path`, `Store.restore`, `planaria.data` | a key of a job, or an attribute |
| setting | `checkpoint.mode: sync`, `MKL_CBWR=COMPATIBLE` | a key, or a name, and its value |
| name | `Orders`, `pls_updates`, `latest(job=...)`, `mfu` | a name in the code, or a word that it says |

Formulas, numbers and values of other kinds are not looked at.
"""  # noqa: E501

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer

import planaria
from planaria.cli import app
from planaria.cluster.events import JobEvent, Struck
from planaria.cluster.run import JobRun
from planaria.config import KINDS, Config
from planaria.errors import ClusterError
from planaria.simulator.__main__ import arguments as simulator_arguments

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "planaria"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCES = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
NAME = r"[A-Za-z_]\w*"

# What others have: CPU instructions, tools, libraries, columns of their files, letters of formulas.
ELSEWHERE = {
    *("prefetchw", "prefetcht0", "prefetcht1", "memcpy", "bgzip", "dd", "true"),
    *("np.take", "np.unique", "torch.optim", "index_add_", "zero_", "async_save", "mmap_mode"),
    *("np.load", "torch.load", "safe_open", "torchrun", "torch.manual_seed", "nn.EmbeddingBag"),
    *("embedding_bags.NAME.weight", "NAME.PART", "optimizer.step", "model.eval"),
    *("NAME.weight", "model.load_state_dict", "dcp.load"),
    *("fused", "golden", "s", "x", "r"),
    *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"),
}


# ------------------------------------------------------------------ what the code has


@cache
def words() -> frozenset[str]:
    """Every name in the code, and every word of its strings but for docstrings."""
    found: set[str] = set()
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *EXAMPLES):
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            for field in ("id", "attr", "name", "arg", "module"):
                value = getattr(node, field, None)
                found |= set(value.split(".")) if isinstance(value, str) else set()
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) not in prose:
                    found |= set(re.findall(r"[\w-]+|[\w.-]+", node.value))
                    found |= set(re.findall(r"\w+", node.value))
    for path in (ROOT / "native").iterdir():
        found |= set(re.findall(NAME, re.sub(r"//.*", "", path.read_text())))
    return frozenset(found)


@cache
def objects() -> dict[str, list[Any]]:
    """Modules by what follows `planaria.`, and classes by name."""
    found: dict[str, list[Any]] = {"planaria": [planaria]}
    for module in pkgutil.walk_packages([str(PACKAGE)], "planaria."):
        if module.name.endswith("__main__") or module.name == "planaria._native":
            continue
        loaded = importlib.import_module(module.name)
        found.setdefault(module.name.removeprefix("planaria."), []).append(loaded)
        for name, value in vars(loaded).items():
            if isinstance(value, type) and value.__module__.startswith("planaria"):
                found.setdefault(name, []).append(value)
    return found


@cache
def options() -> dict[str, set[str]]:
    group: Any = typer.main.get_command(app)
    commands = dict(group.commands)
    for name, command in group.commands.items():
        inner = getattr(command, "commands", {})
        commands |= {f"{name} {one}": inner[one] for one in inner}
    found = {
        f"planaria {name}": {option for param in command.params for option in param.opts}
        for name, command in commands.items()
    }
    parser = simulator_arguments()
    found["planaria.simulator"] = set(parser._option_string_actions)
    for path in (ROOT / "benchmarks").glob("*.py"):
        found[f"benchmarks.{path.stem}"] = set(re.findall(r'"(--[\w-]+)"', path.read_text()))
    return found


# ------------------------------------------------------------------ what a page says


def names_on(page: Path) -> list[str]:
    text = FENCES.sub("", page.read_text())
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)]


def is_true(text: str) -> bool:
    """Whether what stands in backticks is there, or is nothing that this test knows."""
    first, *more = text.split(" ")
    if first in ("planaria", "make", "python") and more:
        return has_command(text)
    if first.startswith("benchmarks.") and more:
        return has_command(f"python -m {text}")
    if first.startswith("--"):
        return any(first in known for known in options().values())
    if re.fullmatch(r"[\w./-]+(\.(py|md|hpp|cpp)|/)", text):
        return any((folder / text).exists() for folder in (ROOT, PACKAGE, ROOT / "docs"))
    if re.fullmatch(rf"{NAME}\.(json|npz|pt|safetensors|state|csv|png|html)", text):
        return text in words() or text.partition(".")[0] in words()
    if setting := re.fullmatch(rf"({NAME}(?:\.{NAME})*)(?:: |=)(.*)", text):
        key, value = setting.groups()
        return has_name(key) and (not re.fullmatch(NAME, value) or has_name(value))
    if call := re.fullmatch(rf"({NAME}(?:\.{NAME})*)\((.*)\)", text):
        keywords = re.findall(rf"({NAME})=", call[2])
        return all(has_name(name) for name in (call[1], *keywords))
    if re.fullmatch(rf"{NAME}(\.{NAME})*|{NAME}(-{NAME})+", text):
        return has_name(text)
    return True


def has_command(text: str) -> bool:
    program, name, *rest = text.split(" ")
    if program == "make":
        return bool(re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    if program == "python":
        name, *rest = rest
    command = name if program == "python" else f"planaria {name}"
    if rest and f"{command} {rest[0]}" in options():
        command = f"{command} {rest[0]}"
    known = options().get(command)
    return known is not None and all(word in known for word in rest if word.startswith("--"))


def has_name(name: str) -> bool:
    if name in KINDS or name in ELSEWHERE or hasattr(builtins, name):
        return True
    head, dot, last = name.rpartition(".")
    if not dot:
        return name in words()
    if name in options() or name.removeprefix("planaria.") in objects():
        return True
    found = objects().get(head.removeprefix("planaria."), [])
    return any(hasattr(one, last) or last in _fields(one) for one in found)


def _fields(one: Any) -> set[str]:
    """What is declared in it, and what the methods of a class set."""
    found = {*getattr(one, "__annotations__", ())}
    if isinstance(one, type):
        found |= set(re.findall(r"\bself\.(\w+)(?:: [^=]+)? = ", inspect.getsource(one)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_on_a_page_is_in_the_code(page: Path) -> None:
    missing = [name for name in names_on(page) if not is_true(name)]
    assert missing == []


@pytest.mark.parametrize(
    "text",
    [
        "planaria trian",
        "planaria train --resumee",
        "planaria data inspect --wirte",
        "make tea",
        "python -m benchmarks.clusters",
        "python -m benchmarks.cluster --onyl gaps",
        "--no-such-option",
        "cluster/supervisor.py",
        "no-such-folder/",
        "checkpoint.evry_s",
        "checkpoint.mode: sinc",
        "Store.no_such_method",
        "Job.rang",
        "planaria.no_such_module",
        "NoSuchClass",
        "no_such_field",
        "latest(no_such_argument=1)",
        "nosuchword",
    ],
)
def test_a_name_that_is_not_there_is_noticed(text: str) -> None:
    assert not is_true(text)


def test_the_page_about_the_report_has_every_field_of_it() -> None:
    page = (ROOT / "docs" / "report.md").read_text()
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))

    def listed(section: str) -> set[str]:
        cells = re.findall(r"^\| (`.*?) \|", sections[section], flags=re.MULTILINE)
        return set(re.findall(r"`(\w+)`", " ".join(cells)))

    run = JobRun(Config())
    struck = Struck("server:2", 2, 5, "killed")
    run.reporter.on_event(JobEvent(1.0, "server-2", struck), Mock())
    report = run.report_failure(ClusterError("lost"))
    assert listed("Of every job") == report.keys() - {"failed"}
    assert listed("A failure") == report["failures"][0].keys()


def test_the_figures_of_the_readme_are_those_of_the_page_that_measured_them() -> None:
    readme, measured = ((ROOT / page).read_text() for page in ("README.md", "docs/benchmarks.md"))
    rows = re.findall(r"^\| (?:\w.*) \| (.*) \| (?:`python .*`|the same) \|$", readme, re.MULTILINE)
    figures = [figure for row in rows for figure in re.findall(r"\d[\d.,]*\d", row)]
    assert len(figures) >= 7
    assert [figure for figure in figures if not re.search(rf"\b{figure}\b", measured)] == []


def test_there_are_names_on_the_pages() -> None:
    assert len([name for page in PAGES for name in names_on(page)]) > 500
