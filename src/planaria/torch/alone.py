"""A script that is started by itself, or a notebook: a job whose only trainer is this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def start_alone() -> socket.socket:
    """Starts a supervisor for the job; returns the line to it, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = str(theirs.fileno())
    with theirs:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "planaria.cluster", "alone", number, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what goes wrong is said on standard error
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for this process
        )
    return ours
