"""How a script becomes a trainer: of the job that it was started for, or of one of its own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from planaria.config import Config
from planaria.config.text import read_file
from planaria.errors import ConfigError, JobOver
from planaria.torch.alone import start_alone
from planaria.torch.devices import device_of
from planaria.torch.job import Job
from planaria.trainer.declaring import SETTINGS, SOCKET, Settings

_alone: list[Job] = []  # this process's own job, if it has one
_given: list[Job] = []  # the job that this process was started for


def connect(config: Mapping[str, Any] | str | Path | None = None, **overrides: Any) -> Job:
    """A trainer of a job: of the one that `planaria run` has started this script for, or of a job
    of its own on this machine.

    config: a YAML file or the same as a dict; overrides: its keys, sections as dicts. What the
    command line sets comes before both.
    """
    given: dict[str, Any] = {}
    if isinstance(config, str | Path):
        # What it names, and no more: the rest is up to the command, or has its default.
        given = dict(read_file(Path(config)) or {})
    elif isinstance(config, Mapping):
        given = dict(config)
    elif config is not None:
        raise ConfigError(
            f"connect: expected the path of a YAML file, or a dict, got {type(config).__name__}"
        )
    for name, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(given.get(name), Mapping)
        given[name] = {**given[name], **value} if both else value
    number, rank, world_size = os.environ.get(SOCKET), 0, 1
    if number:  # else the variables of another launcher, which may be there, mean other jobs
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wanted = given.setdefault("trainers", world_size)
    if str(wanted) != str(world_size):
        raise ConfigError(
            f"trainers: the script wants {wanted}, but {world_size} run it; start it with planaria "
            f"run --set trainers={wanted}"
        )
    command = msgspec.json.decode(os.environ.get(SETTINGS, "null"), type=Settings | None)
    file, sets = (command.file, command.sets) if command else (None, [])
    base = {**((command and command.base) or {}), **given}
    while _alone:  # a notebook's cell that is run again
        with contextlib.suppress(JobOver):
            _alone.pop().finish()
    whole = Config.load(file, [*sets, f"trainers={world_size}"], base)
    if whole.checkpoint.path is not None and "://" not in whole.checkpoint.path:
        # All processes must mean the same one, wherever they are, or the script goes.
        folder = str(Path(whole.checkpoint.path).absolute())
        whole = replace(whole, checkpoint=replace(whole.checkpoint, path=folder))
    device = device_of(whole)
    if number:
        _given[:] = [Job(whole, socket.socket(fileno=int(number)), rank=rank, device=device)]
        return _given[0]
    _alone.append(Job(whole, *start_alone(whole), device=device))
    return _alone[-1]


def is_training() -> bool:
    """Whether the loop that this process was started for has begun, and is not at its end."""
    return any(job._now is not None for job in _given)
