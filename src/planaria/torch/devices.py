"""Where results go and gradients come from: checked when it is named, not in the first forward."""

from __future__ import annotations

import torch

from planaria.config import Config
from planaria.errors import ArgumentError, ConfigError

CPU = torch.device("cpu")


def checked_device(device: torch.device | str) -> torch.device:
    """One that this process can compute on."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    # Torch has no one kind of error for this: it asserts, or says what a build lacks.
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ArgumentError(
            f"device {str(device)!r}: torch cannot use it here ({why}); name one that it can, "
            "such as cpu or cuda:0"
        ) from None
    if found.type == "meta":
        raise ArgumentError(
            "device 'meta' holds no values; rows are on servers in any case, so leave device out"
        )
    return found


def device_of(config: Config) -> torch.device:
    """That of a job's trainers, in this one."""
    try:
        return checked_device(config.trainer.device)
    except ArgumentError as error:
        raise ConfigError(f"trainer.device: {error}") from None
