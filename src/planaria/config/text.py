"""YAML, from a file or from one `--set path=value`. Nothing here knows the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from planaria.config.kinds import shown
from planaria.errors import ConfigError


def read_file(path: Path) -> dict[Any, Any] | None:
    """The keys that it has; None where everything is commented out."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise ConfigError(f"cannot read {path}: {error}; it must be text in UTF-8") from None
    found = _parse(text, str(path))
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{path}: expected keys with values, got {shown(found)}")
    return found


def read_override(text: str) -> tuple[str, object]:
    """(path, value) of `path=value`; nothing behind the = is null."""
    path, equals, value = text.partition("=")
    where = f"--set {text[:80]}"
    if not equals:
        raise ConfigError(f"{where}: expected path=value, as in --set steps=400")
    return path.strip(), _parse(value, where)


def _parse(text: str, where: str) -> object:
    try:
        _refuse_twins(yaml.compose(text, Loader=yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except ConfigError:
        raise
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n"), len(before) - (before.rfind("\n") + 1)
        raise ConfigError(_at(where, line, column, error.reason)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(_at(where, mark.line, mark.column, error.problem)) from None
    except Exception as error:  # PyYAML lets through what int(), date() and its own tables raise
        raise ConfigError(f"{where}: not a YAML value ({error}); put it in quotes") from None


def _refuse_twins(root: object, where: str) -> None:
    """Of two equal keys YAML's reader keeps the last and drops the other without a word."""
    nodes = [root]
    if isinstance(root, yaml.MappingNode):
        nodes += [value for _, value in root.value]
    twins: list[str] = []
    for node in nodes:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"{key.value!r} stands here twice"
                    twins.append(_at(where, key.start_mark.line, key.start_mark.column, problem))
                seen.add(key.value)
    if twins:
        raise ConfigError("\n".join(twins))


def _at(where: str, line: int, column: int, problem: str) -> str:
    return f"{where}, line {line + 1}, column {column + 1}: {problem}"
