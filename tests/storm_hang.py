"""Hangs the main thread of a process for a while: storm_hang.py PID SECONDS.

A process of its own, because who traces another is the first to be told of its death and must pass
that on. When this one ends, however it does, the thread goes on.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WALL = 0x40000000  # of waitpid: threads, too
LOOK_S = 0.02


def hang_main_thread(pid: int, seconds: float) -> None:
    """Stops that one thread; hearts beat in others."""
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if trace(PTRACE_SEIZE, pid, None, None) or trace(PTRACE_INTERRUPT, pid, None, None):
        raise OSError(ctypes.get_errno(), f"process {pid} cannot be traced")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG | WALL)
        if found and not os.WIFSTOPPED(status):
            return  # it was killed, and its parent is told now
        time.sleep(LOOK_S)
    trace(PTRACE_DETACH, pid, None, None)


if __name__ == "__main__":
    hang_main_thread(int(sys.argv[1]), float(sys.argv[2]))
