"""One process of a job: python -m planaria.cluster ROLE FOLDER MEMBER [NUMBER].

Started by the supervisor, never by hand.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from pathlib import Path

from planaria.cluster.files import JobFiles
from planaria.coordinator.machine import FENCED

PR_SET_PDEATHSIG = 1
EXIT_FAILED = 1
EXIT_FENCED = 6


def main() -> int:
    role, folder, member, *number = sys.argv[1:]
    files = JobFiles(Path(folder))
    # If the supervisor is killed between two reads of standard input, the kernel tells us.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    place = int(number[0]) if number else None
    try:
        if role == "coordinator":
            from planaria.cluster.coordinator_node import CoordinatorNode

            CoordinatorNode(files, member).run()
            return 0
        if role == "server":
            from planaria.cluster.server_node import ServerNode

            reason = ServerNode(files, member, place).run()
        else:
            from planaria.cluster.trainer_node import TrainerNode

            reason = TrainerNode(files, member, place).run()
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED
    return EXIT_FENCED if reason == FENCED else 0


if __name__ == "__main__":
    sys.exit(main())
