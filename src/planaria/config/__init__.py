"""The configuration of a job: one type, checked once at the door, trusted inside.

A key is a field with the kind of value that it takes beside its type and default, so `job` says
everything about a key but its meaning, which is in docs/config.md. `Config.load` reads a small YAML
file and `--set path=value` overrides. `Config.from_dict` takes what `to_dict` gave and touches no
file, so that a configuration can travel to machines that do not have the data. A wrong value is
refused with its path, what was expected and what was found; all that are wrong in one message.
"""

from planaria.config.job import (
    KINDS,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    HistoryConfig,
    ModelConfig,
    RebuildConfig,
    Reproducible,
    ScrubConfig,
    ThreadsConfig,
)
from planaria.config.optimizer import OptimizerConfig
from planaria.config.protection import check_required, describe_protection, describe_shared

__all__ = [
    "KINDS",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "HistoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RebuildConfig",
    "Reproducible",
    "ScrubConfig",
    "ThreadsConfig",
    "check_required",
    "describe_protection",
    "describe_shared",
]
