"""How fast a job is: samples per second, and the CPU time of a step, read from the kernel.

Read at two steps of a job that is running, so nothing is slowed down by being watched.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent, Watcher
from planaria.cluster.run import JobRun
from planaria.cluster.scripts import INCLUDED, Scripts, environment_of, job_of
from planaria.config import Config
from planaria.trainer.declaring import Settings
from planaria.wire.control import StepDone

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FIRST_STEP = 20  # start-up is over by then
ROOT = Path(__file__).parents[1]

Use = Counter[tuple[str, str]]
"""(role, thread) -> ticks of CPU"""


class Speed(NamedTuple):
    samples_per_s: float
    trainer_ms: float  # of CPU in a step, all threads of all trainers
    all_ms: float  # of CPU in a step, servers and coordinator as well


def cpu_of(pid: int, role: str) -> Use:
    """Threads that have ended count as others."""
    found: Use = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            name, ticks = _ticks(task)
            thread = "io" if "ZMQ" in name else "main" if task.name == str(pid) else "other"
            found[role, thread] += ticks
    found[role, "other"] += _ticks(Path(f"/proc/{pid}"))[1] - found.total()
    return found


def _ticks(folder: Path) -> tuple[str, int]:
    name, fields = (folder / "stat").read_text().rsplit(") ", 1)
    user, system = fields.split()[11:13]
    return name, int(user) + int(system)


class Looks(Watcher):
    """Looks at a job's processes when a first and a last step are done."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.looks: list[tuple[int, float, Use]] = []

    def on_event(self, event: JobEvent, processes: Attempt) -> None:
        done = event.what
        if not isinstance(done, StepDone) or done.rank != 0:
            return
        if done.step in (FIRST_STEP, self.config.steps):
            use: Use = Counter()
            for process in processes.launcher.processes.values():
                use += cpu_of(process.handle.pid, process.role)
            self.looks.append((done.step, event.at, use))

    def per_step(self) -> tuple[float, dict[tuple[str, str], float]]:
        """Milliseconds on the wall, and of CPU by role and thread."""
        (first, start, before), (last, end, after) = self.looks
        steps = last - first
        used = {key: (after[key] - before[key]) / TICKS_PER_S / steps for key in sorted(after)}
        return (end - start) / steps * 1e3, {key: cpu * 1e3 for key, cpu in used.items()}

    def speed(self) -> Speed:
        wall_ms, used = self.per_step()
        trainer_ms = sum(cpu for (role, _), cpu in used.items() if role == "trainer")
        return Speed(self.config.batch / wall_ms * 1e3, trainer_ms, sum(used.values()))


def built_in_speed(config: Config) -> Speed:
    """Of the loop of `planaria train`."""
    looks = Looks(config)
    JobRun(config, observers=[looks]).run()
    return looks.speed()


def earlier_speed(checkout: Path, config: Config, sets: Sequence[str]) -> Speed:
    """Of the loop of `planaria train` as it was in another checkout, which `make train` has
    installed: by its own benchmarks.profile, which prints a line for each role and thread.
    """
    profile = (
        "import sys; from benchmarks.profile import profile; from planaria.config import Config; "
        "profile('before', Config.load(None, sys.argv[1:]))"
    )
    command = [str(checkout / ".venv" / "bin" / "python"), "-c", profile, *sets]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    wall_ms = float(re.findall(r"([\d.]+) ms a step", done.stdout)[0])
    used = re.findall(r"(\w+) +\w+ +([\d.]+) ms of CPU", done.stdout)
    trainer_ms = sum(float(cpu) for role, cpu in used if role == "trainer")
    all_ms = sum(float(cpu) for _, cpu in used)
    return Speed(config.batch / wall_ms * 1e3, trainer_ms, all_ms)


def script_speed(config: Config, script: Path, *arguments: str) -> tuple[Speed, list[str]]:
    """Of a script's loop; and what it has printed."""
    said: list[str] = []
    variables = environment_of(config, Settings(None, [], config.to_dict()))
    variables["PYTHONPATH"] = str(ROOT)  # for what scripts share with their benchmark
    command = [str(script), *arguments]
    with Scripts(command, config.trainers, 0, variables, said.append) as scripts:
        declared = Config.from_dict(job_of(scripts.declare(), own_data=script != INCLUDED))
        looks = Looks(declared)
        JobRun(declared, observers=[looks], scripts=scripts).run()
    return looks.speed(), said
