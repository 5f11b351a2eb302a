"""The file with the key of a job that hosts join: whoever has it may take part, nobody else."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from planaria.cluster.transport import Keys
from planaria.errors import ConfigError
from planaria.files import write_atomically

TOKEN_BYTES = 16


def new_key() -> Keys:
    return Keys.make(secrets.token_bytes(TOKEN_BYTES), encrypt=True)


def write_key(path: Path, keys: Keys) -> None:
    """Readable by the owner alone."""
    try:
        write_atomically(path.absolute(), msgspec.json.encode(keys) + b"\n", 0o600)
    except OSError as error:
        raise ConfigError(f"--key: {path} cannot be written: {error.strerror or error}") from None


def read_key(path: Path) -> Keys:
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=Keys)
    except OSError as error:
        raise ConfigError(
            f"--key: {path} cannot be read: {error.strerror or error}; it is the file that "
            "planaria train --on none has written, as it is on the machine that runs it"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(f"--key: {path} is no key of Planaria's") from None
    if len(keys.token) != TOKEN_BYTES or keys.public is None or keys.secret is None:
        raise ConfigError(f"--key: {path} is no key of Planaria's")
    return keys
