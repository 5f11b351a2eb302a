"""A script that is started by itself, or a notebook: a job whose only trainer is this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch

from planaria.config import Config
from planaria.errors import ConfigError
from planaria.exactness import PORTABLE

OF_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def start_alone(config: Config) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts a supervisor for the job; returns the line to it, which ends with this process."""
    _settle(config)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = str(theirs.fileno())
    with theirs:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "planaria.cluster", "alone", number, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what goes wrong is said on standard error
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for this process
        )
    return ours, supervisor


def _settle(config: Config) -> None:
    """What `planaria run` does by variables. Torch would take all cores, which the servers need as
    well; whoever has set a number of threads keeps it.
    """
    lacking = [pair for pair in PORTABLE.items() if os.environ.get(pair[0]) != pair[1]]
    if config.reproducible == "portable" and lacking:
        wanted = " ".join(f"{name}={value}" for name, value in lacking)
        raise ConfigError(
            "reproducible: portable needs variables that were there when Python started; start the "
            f"script with planaria run, or with {wanted}"
        )
    if not any(os.environ.get(name) for name in OF_THREADS):
        torch.set_num_threads(config.threads.trainer)
