"""The door: known keys with right values come in, and everything that is wrong is said at once.

Nothing here knows the keys. They are the fields of a dataclass and of the dataclasses in it, its
sections, each annotated with the kind of value that it takes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from planaria.config.kinds import Kind, Wrong, WrongInside, shown
from planaria.errors import ConfigError


class Door:
    """The keys of a configuration: `kinds` by path, `sections` by name.

    keys: of fields of the root that are called otherwise.
    """

    def __init__(self, root: type, keys: Mapping[str, str]) -> None:
        hints = get_type_hints(root, include_extras=True)
        hints = {keys.get(name, name): hint for name, hint in hints.items()}
        self.sections: dict[str, Any] = {n: hint for n, hint in hints.items() if is_dataclass(hint)}
        self.kinds: dict[str, Kind] = {
            name: hint.__metadata__[0] for name, hint in hints.items() if name not in self.sections
        }
        for name, section in self.sections.items():
            inner = get_type_hints(section, include_extras=True)
            self.kinds |= {f"{name}.{key}": hint.__metadata__[0] for key, hint in inner.items()}

    def keys_in(self, section: str) -> list[str]:
        """The paths of a section's keys; those outside all sections for ""."""
        return [path for path in self.kinds if path.rpartition(".")[0] == section]

    def guess(self, path: str) -> str | None:
        """What an unknown path may have been meant to be: a key or a section."""
        section, _, name = path.rpartition(".")
        misplaced = [known for known in self.kinds if known.rpartition(".")[2] == name]
        if section in self.sections:
            names = [known.partition(".")[2] for known in self.keys_in(section)]
            near = difflib.get_close_matches(name, names, n=1)
            guesses = [*misplaced, *(f"{section}.{inner}" for inner in near)]
        else:
            known = [*self.kinds, *self.sections]
            guesses = difflib.get_close_matches(path, known, n=1) + misplaced
        return guesses[0] if guesses else None


class Reading:
    """One configuration on its way in: what was given, and everything that is wrong with it.

    `unsure` are the keys whose values are not known, because something about them was wrong: what
    they would mean together with others cannot be judged.
    """

    def __init__(self, door: Door) -> None:
        self.door = door
        self.problems: list[str] = []
        self.unsure: set[str] = set()
        self._given: dict[str, object] = {}

    def refuse(self, problem: object, unsure: Iterable[str]) -> None:
        self.problems.append(str(problem))
        self.unsure.update(unsure)

    def take_all(self, values: object) -> None:
        """Keys outside sections, and sections with the keys in them."""
        for name, value in self._mapping("", values).items():
            path = name if isinstance(name, str) else shown(name)
            if name in self.door.sections:
                for inner, found in self._mapping(path, value).items():
                    self.take(f"{path}.{inner if isinstance(inner, str) else shown(inner)}", found)
            elif "." in path and path in self.door.kinds:
                section, _, inner_name = path.partition(".")
                problem = f"{path}: expected {inner_name} below {section}:, not with a dot"
                self.refuse(problem, [path])
            else:
                self.take(path, value)

    def take(self, path: str, value: object) -> None:
        """One key; it replaces what was given before."""
        if path in self.door.kinds:
            self._given[path] = value
        elif path in self.door.sections:
            keys = self.door.keys_in(path)
            self.refuse(f"{path}: a section, not a key; set one of {', '.join(keys)}", keys)
        else:
            self._refuse_unknown(path)

    def values(self) -> dict[str, dict[str, Any]]:
        """What was given, read: by section, and by name in it. Wrong values are left out."""
        read: dict[str, dict[str, Any]] = {section: {} for section in ("", *self.door.sections)}
        for path, found in self._given.items():
            section, _, name = path.rpartition(".")
            kind = self.door.kinds[path]
            try:
                read[section][name] = kind.read(found)
            except WrongInside as wrong:
                for at, problem in wrong.problems:
                    self.refuse(f"{path}.{at}: {problem}", [path])
            except Wrong as wrong:
                self.refuse(f"{path}: expected {kind.expected}, got {shown(found)}{wrong}", [path])
        return read

    def check(self) -> None:
        if self.problems:
            raise ConfigError("\n".join(dict.fromkeys(self.problems)))

    def _mapping(self, path: str, value: object) -> Mapping[object, object]:
        if value is None:  # a section, or a file, in which everything is commented out
            return {}
        if not isinstance(value, Mapping):
            where = f"{path}: " if path else ""
            keys = self.door.keys_in(path) if path else self.door.kinds
            self.refuse(f"{where}expected keys with values, got {shown(value)}", keys)
            return {}
        return value

    def _refuse_unknown(self, path: str) -> None:
        door, meant = self.door, self.door.guess(path)
        if meant is None:
            section = path.rpartition(".")[0]
            in_section = section in door.sections
            listed = door.keys_in(section) if in_section else [*door.keys_in(""), *door.sections]
            self.refuse(f"{path[:80]}: unknown key; known are {', '.join(listed)}", [])
        else:
            keys = door.keys_in(meant) if meant in door.sections else [meant]
            self.refuse(f"{path[:80]}: unknown key; did you mean {meant}?", keys)
