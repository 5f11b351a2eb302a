"""The page about the keys says what is true."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from any_config import DEFAULTS

from planaria.config import Config
from planaria.errors import ConfigError

PAGE = (Path(__file__).parent.parent / "docs" / "config.md").read_text()


def test_the_page_lists_every_key_with_its_true_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|[^|]*\| .+ \|$", PAGE, flags=re.MULTILINE)
    listed = [(path, yaml.safe_load(default)) for path, default in rows]
    assert listed == list(DEFAULTS.items()), "order counts: it is that of the fields"
    assert all(type(value) is type(DEFAULTS[path]) for path, value in listed)


def test_the_example_of_the_page_loads_and_shows_every_section(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    file = tmp_path / "job.yaml"
    file.write_text(example)
    config = Config.load(file)
    sections = [
        f.name
        for f in dataclasses.fields(Config)
        if dataclasses.is_dataclass(getattr(config, f.name))
    ]
    assert all(getattr(config, name) != getattr(Config(), name) for name in sections)


def test_the_commands_and_refusals_of_the_page_are_true(tmp_path: Path) -> None:
    [command] = re.findall(r"^planaria train job.yaml (.*)$", PAGE, flags=re.MULTILINE)
    overrides = re.findall(r"--set (?:'([^']*)'|(\S+))", command)
    assert len([Config.load(None, [a or b]) for a, b in overrides]) == 3
    file = tmp_path / "job.yaml"
    file.write_text("steps: 3\nseed: 1\nsteps: 4\n")
    said = []
    for path, override in (
        (None, "optimizer.lr=fast"),
        (None, "optimizer.lrr=1"),
        (None, "k=9"),
        (file, "k=1"),
    ):
        with pytest.raises(ConfigError) as caught:
            Config.load(path, [override])
        said.append(str(caught.value).replace(f"{tmp_path}/", ""))
    assert "\n".join(said) in PAGE
