"""Whether this machine can carry the job: asked before anything starts, everything at once.

Records and parity are counted exactly, from the layout; what processes take beside them is
estimated. All is for one machine that runs the whole job.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from planaria.checkpoints import RAW_BITS
from planaria.checkpoints.folders import LocalFolder, open_folder
from planaria.cluster.facts import Facts, read_facts
from planaria.cluster.lending import LENT_BYTES
from planaria.cluster.tiering import tier_of, tier_problems, touched_rows
from planaria.config import Config
from planaria.dense import KEEP, keepers
from planaria.errors import CheckpointError, ConfigError
from planaria.server.arena import room_for
from planaria.trainer.dense import dlrm_layers

TRAINER_BYTES = 250 << 20  # torch, loaded
SERVER_BYTES = 60 << 20  # and the coordinator
TASKS_BESIDE = 6  # threads of a process that compute nothing: transport, beats, a writer
DESCRIPTORS_PER_PEER = 3
DESCRIPTORS_BESIDE = 100  # libraries, logs, files of a checkpoint
SOCKET_NAME = "/coordinator-00000.ipc"  # the longest in the job's folder
HOME_BYTES = 4 << 20  # of a job's folder: what its coordinators save, and logs
SUN_PATH_BYTES = 107
NEARLY_ALL = 0.8


@dataclass(frozen=True)
class Memory:
    """Bytes of all processes of a job on one machine, by purpose."""

    records: int
    parity: int
    history: int
    spares: int  # records that they would take over
    processes: int  # code, batches, the dense network

    @property
    def total(self) -> int:
        return self.records + self.parity + self.history + self.spares + self.processes


def check(
    config: Config,
    start_bytes: int = 0,
    *,
    folder: Path | None = None,
    facts: Facts | None = None,
) -> list[str]:
    """Notes for the user; raises ConfigError with all problems, one per line.

    start_bytes: of the checkpoint that the job starts from, which its folder has already.
    folder: the job's, where its sockets will be.
    """
    facts = read_facts() if facts is None else facts
    problems = [
        *_memory_problems(config, facts),
        *tier_problems(config),
        *_descriptor_problems(config, facts),
        *_task_problems(config, facts),
        *_address_problems(config, folder),
        *_home_problems(folder),
    ]
    notes = list(_memory_notes(config, facts))
    if config.checkpoint.path is not None and config.saves:
        probed = _folder_problems(config.checkpoint.path)
        free = None if probed else _free_space(config.checkpoint.path)
        problems += probed or _space_problems(config, free)
        notes += _space_notes(config, start_bytes, free)
    if problems:
        raise ConfigError("\n".join(problems))
    return notes


# ---------------------------------------------------------------------------------------- memory


def memory_needed(config: Config) -> Memory:
    records = parity = history = spares = 0
    for arena in config.arenas:
        layout = config.layout.arena(arena.rows)
        data = sum(layout.data_records(place) for place in config.layout.places)
        held = sum(layout.records(place) for place in config.layout.places)
        room = sum(room_for(layout, layout.records(place)) for place in config.layout.places)
        records += data * arena.words * 4 + room // 8  # and a bit that says whether it is valid
        parity += (held - data) * arena.words * 4
        if config.r or config.survival.partial:  # a spare's memory is there before it is needed
            largest = max(layout.records(place) for place in config.layout.places)
            spares += config.spares * largest * arena.words * 4
        change = (arena.words * 4 + 8) * (1 + config.r)  # a delta and an index, here and there
        touched = touched_rows(config, len(arena.table_ids))
        history += min(touched, arena.rows) * change * config.history.steps
    if config.tier.ram is not None and tier_of(config) is not None:
        # What is not history is records, parity among them, and where the others are.
        records = config.servers * config.tier.ram - history
        parity = spares = 0
    servers = config.servers + config.spares + 2  # the coordinator and a nursery are as large
    state, gradient = dense_bytes(config)
    of_trainers = config.trainers * (TRAINER_BYTES + (1 + KEEP) * state + 2 * KEEP * gradient)
    of_keepers = keepers(config.r, config.trainers) * KEEP * state
    processes = servers * SERVER_BYTES + of_keepers + of_trainers + _batch_bytes(config)
    processes += _lent_bytes(config)
    return Memory(records, parity, history, spares, processes)


def dense_bytes(config: Config) -> tuple[int, int]:
    """Of weights and optimizer state; and of a gradient, which is as large as a sum."""
    if config.script.parameters is not None:  # Adam has the most
        return 12 * config.script.parameters, 4 * config.script.parameters
    parameters = sum(
        layer.parameters
        for layer in dlrm_layers(
            config.model.tables, config.model.dim, config.model.bottom, config.model.top
        )
    )
    return 4 * config.optimizer_rule.record_words(parameters), 4 * parameters


def _batch_bytes(config: Config) -> int:
    """Of all trainers: embeddings and their gradients, as looked up and as pushed."""
    return sum(touched_rows(config, 1) * table.dim for table in config.tables) * 4 * 4


def _lent_bytes(config: Config) -> int:
    """What mates lend a server that is rebuilt. Deltas, rows and gradients are counted elsewhere:
    a copy that is lent takes the place of one that is received.
    """
    if config.cluster.transport != "ipc" or config.cluster.encrypted or not config.r:
        return 0
    record = max(arena.words for arena in config.arenas) * 4
    return config.servers * min(LENT_BYTES, config.rebuild.jobs * config.rebuild.chunk * record)


def _memory_problems(config: Config, facts: Facts) -> Iterator[str]:
    needed = memory_needed(config)
    if facts.memory_bytes is not None and needed.total > facts.memory_bytes:
        key, advice = _what_to_lower(config, needed)
        yield (
            f"{key}: the job needs {_size(needed.total)} of memory on this machine (records "
            f"{_size(needed.records)}, parity {_size(needed.parity)}, history "
            f"{_size(needed.history)}, spares {_size(needed.spares)}, processes "
            f"{_size(needed.processes)}), but {_size(facts.memory_bytes)} are free; {advice}"
        )


def _what_to_lower(config: Config, needed: Memory) -> tuple[str, str]:
    """The key that takes most, and what to do."""
    if needed.processes > needed.total // 2:
        return "trainers", "lower trainers, servers, spares or batch"
    if needed.history > needed.total // 2:
        return "history.steps", "lower it or batch"
    cheaper = " or parity, raise k" if needed.parity else ""
    key = "model.rows" if config.declared_tables is None else "tables"
    spares = ", do without spares" if needed.spares else ""
    advice = f"lower rows, dim{cheaper}{spares}, or take an optimizer with less state"
    return key, advice


def _memory_notes(config: Config, facts: Facts) -> Iterator[str]:
    needed = memory_needed(config).total
    if facts.memory_bytes is not None and needed > NEARLY_ALL * facts.memory_bytes:
        yield f"the job takes {_size(needed)} of the {_size(facts.memory_bytes)} of free memory"


def check_servers(config: Config, now: int, wanted: int, facts: Facts | None = None) -> None:
    """Whether this machine can carry a job that runs on it while its servers become more or fewer;
    raises ConfigError with all problems. What moves is there twice meanwhile.
    """
    facts = read_facts() if facts is None else facts
    come, needed = max(wanted - now, 0), memory_needed(config)
    moves = (needed.records + needed.parity) * abs(wanted - now) // max(wanted, now)
    more, tasks = come * SERVER_BYTES + moves, come * (config.threads.server + TASKS_BESIDE)
    problems = [*_descriptor_problems(replace(config, servers=max(wanted, now)), facts)]
    if facts.memory_bytes is not None and more > facts.memory_bytes:
        problems.append(
            f"servers: that takes {_size(more)} more of memory on this machine while records move "
            f"({_size(moves)} of records and parity, and {come} more processes), but "
            f"{_size(facts.memory_bytes)} are free; take steps of fewer servers, or make room"
        )
    if facts.tasks is not None and tasks > facts.tasks:
        problems.append(
            f"servers: {come} more processes have about {tasks} threads, but only {facts.tasks} "
            "more may be started; raise the limit (ulimit -u, or pids of the container)"
        )
    if problems:
        raise ConfigError("\n".join(problems))


# --------------------------------------------------------------------- descriptors and processes


def _processes(config: Config) -> int:
    """Servers, spares, trainers, coordinator, the two that the others are forked from."""
    return config.servers + config.spares + config.trainers + 3


def descriptors_needed(config: Config) -> int:
    """Of the process that has most: it knows all others."""
    return DESCRIPTORS_PER_PEER * _processes(config) + DESCRIPTORS_BESIDE


def _descriptor_problems(config: Config, facts: Facts) -> Iterator[str]:
    needed = descriptors_needed(config)
    if facts.descriptors is not None and needed > facts.descriptors:
        yield (
            f"servers: a process among {_processes(config)} needs about {needed} open files, but "
            f"the limit is {facts.descriptors}; raise it (ulimit -Hn {needed}, or nofile of the "
            "container or service), or lower servers, spares or trainers"
        )


def tasks_needed(config: Config) -> int:
    of_servers = (config.servers + config.spares + 1) * (config.threads.server + TASKS_BESIDE)
    return of_servers + (config.trainers + 1) * (config.threads.trainer + TASKS_BESIDE)


def _task_problems(config: Config, facts: Facts) -> Iterator[str]:
    needed = tasks_needed(config)
    if facts.tasks is not None and needed > facts.tasks:
        yield (
            f"servers: {_processes(config)} processes have about {needed} threads, but only "
            f"{facts.tasks} more may be started; raise the limit (ulimit -u, or pids of the "
            "container), or lower servers, spares, trainers or threads"
        )


# ------------------------------------------------------------------------------------- addresses


def _address_problems(config: Config, folder: Path | None) -> Iterator[str]:
    host = config.cluster.host
    if config.cluster.transport == "ipc":
        length = 0 if folder is None else len(f"{folder}{SOCKET_NAME}".encode())
        if length > SUN_PATH_BYTES:
            yield (
                f"cluster.transport: names of sockets in {folder} have {length} bytes, but "
                f"{SUN_PATH_BYTES} is the most; choose a folder with a shorter name, or tcp"
            )
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.bind(address)
    except OSError as error:
        yield (
            f"cluster.host: cannot listen on {host}: {error.strerror or error}; give a name or IP "
            "address of this machine"
        )


def _home_problems(folder: Path | None) -> Iterator[str]:
    """Where views and logs are written. folder: the job's, which is not made yet."""
    there = [parent for parent in folder.parents if parent.is_dir()] if folder else []
    if there and (free := shutil.disk_usage(there[0]).free) < HOME_BYTES:
        yield (
            f"PLANARIA_HOME: {there[0]} has room for {_size(free)}, but a job's views and logs may "
            f"take {_size(HOME_BYTES)}; make room, or set PLANARIA_HOME to another folder"
        )


# ------------------------------------------------------------------------------------ checkpoints


def checkpoint_bytes(config: Config) -> int:
    """Of a full one: all rows once, and the dense network. Weights may have fewer bits."""
    total, _ = dense_bytes(config)
    for arena in config.arenas:
        saved_bits = 32 * (arena.words - arena.dim) + config.checkpoint.bits * arena.dim
        total += arena.rows * (saved_bits // 8 + (8 if config.checkpoint.bits < RAW_BITS else 0))
    return total


def _folder_problems(path: str) -> list[str]:
    """Whether a file can be written there, read back and removed."""
    name, content = f"probe-{secrets.token_hex(4)}.tmp", secrets.token_bytes(32)
    try:
        folder = open_folder(path)
        folder.write(name, content)
        try:
            if folder.read(name) != content:
                return [f"checkpoint.path: {path} gives back other bytes than were written"]
        finally:
            folder.remove(name)
    except CheckpointError as error:
        return [f"checkpoint.path: {error}"]
    except OSError as error:
        return [
            f"checkpoint.path: {path} cannot be written: {error.strerror or error}; check that it "
            "is there and yours, or choose another"
        ]
    return []


def _free_space(path: str) -> int | None:
    folder = open_folder(path)
    return shutil.disk_usage(folder.path).free if isinstance(folder, LocalFolder) else None


def _space_problems(config: Config, free: int | None) -> list[str]:
    size = checkpoint_bytes(config)
    if free is None or size <= free:
        return []
    return [
        f"checkpoint.path: a checkpoint has {_size(size)}, but {config.checkpoint.path} has room "
        f"for {_size(free)}; make room, choose another folder, or lower checkpoint.bits"
    ]


def _space_notes(config: Config, start_bytes: int, free: int | None) -> Iterator[str]:
    kept = config.checkpoint.keep_last + 1  # an old one goes when the new one is there
    needed = kept * checkpoint_bytes(config) - start_bytes
    if free is not None and needed > free:
        yield (
            f"{config.checkpoint.path} has room for {_size(free)}, but checkpoint.keep_last = "
            f"{kept - 1} full checkpoints and the next one take {_size(needed)} more"
        )


def _size(count: float) -> str:
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:,.1f} TB"
