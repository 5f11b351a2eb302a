"""The shape of the project: its exports, the direction of its imports, the truth of its pages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import planaria
from planaria.strategies import STRATEGIES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "planaria"

# The order of reading and of imports: a part may import only what stands before it.
ORDER = [
    "errors",
    "files",
    "collecting",
    "layout",
    "kernels",
    "codes",
    "optimizers",
    "tables",
    "records",
    "formulas",
    "strategies",
    "checkpoints",
    "data",
    "placement",
    "config",
    "exactness",
    "schedule",
    "wire",
    "dense",
    "server",
    "trainer",
    "coordinator",
    "control",
    "simulator",
    "cluster",
    "torch",
    "tensors",
    "exporting",
    "foreign",
    "importing",
    "models",
    "__init__",
    "exits",
    "display",
    "inspecting",
    "outside",
    "planning",
    "placing",
    "comparing",
    "compressing",
    "running",
    "watching",
    "scaling",
    "joining",
    "cli",
    "__main__",
]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The parts of planaria that a module imports, wherever in it the import stands."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name == "planaria":
                parts.add("__init__")
            elif name.startswith("planaria."):
                parts.add(name.split(".")[1])
    return parts & set(ORDER)


def wrong_imports(order: list[str]) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)} imports {part}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for part in imported_parts(path) - {part_of(path)}
        if order.index(part) > order.index(part_of(path))
    ]


def test_imports_point_one_way() -> None:
    assert {part_of(path) for path in PACKAGE.rglob("*.py")} == set(ORDER)
    assert wrong_imports(ORDER) == []
    assert wrong_imports(ORDER[::-1]) != []  # control


def compared_names(source: str) -> list[str]:
    """Comparisons with the name of a strategy: whoever makes one knows what only that one does."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        else:
            continue
        for side in sides:
            among = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
            if any(map(_names_a_strategy, among)):
                found.append(ast.unparse(node))
    return found


def _names_a_strategy(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "name":
        return ast.unparse(node.value).split(".")[-1] in {name.upper() for name in STRATEGIES}
    return isinstance(node, ast.Constant) and node.value in STRATEGIES


def test_a_strategy_is_asked_and_its_name_compared_with_nothing() -> None:
    found = {
        str(path.relative_to(PACKAGE)): compared_names(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path.name != "strategies.py" or path.parent != PACKAGE
    }
    assert {path: names for path, names in found.items() if names} == {}
    assert compared_names("partial = survival.partial and saves['checkpoint'] == 3") == []


@pytest.mark.parametrize(
    "source",
    [
        "rolls_back = what.kind != 'erasure'",
        "rolls_back = 'cpr' == what.kind",
        "saves = job.strategy in ('checkpoint', 'cpr')",
        "saves = job.strategy not in (ERASURE.name, strategies.NONE.name)",
        "match kind:\n    case 'none':\n        pass",
    ],
)
def test_a_comparison_with_the_name_of_a_strategy_is_seen(source: str) -> None:
    assert len(compared_names(source)) == 1


def test_the_public_names_are_these() -> None:
    assert sorted(planaria.__all__) == [
        "Code",
        "Digest",
        "Initial",
        "Layout",
        "Optimizer",
        "PlanariaError",
        "Store",
        "Table",
        "__version__",
    ]
    assert all(hasattr(planaria, name) for name in planaria.__all__)


def test_no_file_holds_two_ideas() -> None:
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "native").iterdir(), *(ROOT / "tests").glob("*.py")]
    too_long = [path.name for path in sources if len(path.read_text().splitlines()) > 500]
    assert too_long == []


def test_the_tree_on_its_page_is_the_tree_of_files() -> None:
    page = (ROOT / "docs" / "tree.md").read_text()
    (tree,) = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    listed: list[str] = []
    folders: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name.rstrip("/")]
        listed.append("/".join(folders))
    assert [path for path in listed if not (ROOT / path).exists()] == []
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    sources += [path for path in (ROOT / "native").iterdir() if not _has_header(path)]
    files = {str(path.relative_to(ROOT)) for path in sources if path.name != "__init__.py"}
    assert files - set(listed) == set(), "docs/tree.md lacks these"
    parts = [path for path in listed if re.fullmatch(r"src/planaria/[a-z]+(\.py)?", path)]
    names = [path.removeprefix("src/planaria/").removesuffix(".py") for path in parts]
    assert names == [part for part in ORDER if not part.startswith("__")]


def _has_header(path: Path) -> bool:
    return path.suffix == ".cpp" and path.with_suffix(".hpp").exists()


def run_planaria(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planaria", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_drill_kills_a_server_and_ends_with_equal_digests() -> None:
    small = ["steps=20", "batch=32", "model.rows=100", "model.tables=3", "data.test_samples=100"]
    done = run_planaria("drill", *(f"--set={pair}" for pair in small), "--kill", "server:3@10")
    assert done.returncode == 0, done.stdout + done.stderr
    digests = re.findall(r"digest \w+ +([0-9a-f]{32})", done.stdout)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    assert "server:3 killed at step 10" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "servers=2", "--set", "parity=3"], "servers"),
        (["--kill", "server:9@1"], "expected server:0 to server:5"),
        (["--kill", "banana"], "expected WHO@STEP"),
        (["--set", "steps=0"], "steps: expected"),
        (["--set", "optimizer.lrr=1"], "did you mean optimizer.lr?"),
        (["no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_bad_arguments_get_a_sentence_and_exit_code_2(arguments: list[str], says: str) -> None:
    done = run_planaria("train", *arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
