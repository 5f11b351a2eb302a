"""What the commands of the README would run; nothing is installed here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def planned(target: str) -> str:
    """In a fresh clone: -B takes everything for out of date, -n runs nothing."""
    # As from a shell: the tests themselves may be run by make.
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        ["make", "-n", "-B", target],
        cwd=ROOT,
        env=outside,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_training_installs_the_package_alone_and_says_what_that_takes() -> None:
    """`make train` was silent for minutes, and installed mypy, ruff and clang-format."""
    first, *others = planned("train").splitlines()
    assert first.startswith('echo "installing Planaria and PyTorch into .venv: some minutes and ')
    (install,) = [line for line in others if "pip install" in line]
    assert install.endswith(" -e .")


@pytest.mark.parametrize("target", ["test", "campaigns", "check", "format", "kills", "sanitize"])
def test_what_tests_and_checks_need_is_installed_without_building_the_package_again(
    target: str,
) -> None:
    plan = planned(target)
    assert plan.count(" -e .\n") == 1
    assert plan.index(" -e .\n") < plan.index(" dev | xargs ") < plan.index(".installed-dev")
