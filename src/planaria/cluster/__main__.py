"""One process of a job: python -m planaria.cluster ROLE FOLDER MEMBER [NUMBER].

Started by the supervisor, never by hand. Or a nursery of such processes, which has no job of its
own: python -m planaria.cluster nursery ROLE.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from planaria.cluster.files import JobFiles
from planaria.cluster.nursery import serve
from planaria.cluster.scripts import INCLUDED, run_script
from planaria.cluster.transport import raise_descriptor_limit
from planaria.control.children import EXIT_DONE, EXIT_FAILED, EXIT_FENCED, EXIT_ORPHAN, EXIT_REFUSED
from planaria.coordinator.machine import FENCED
from planaria.errors import CheckpointError, DataError, JobOver, PlanariaError, TierError
from planaria.trainer.declaring import SOCKET, Raised, encode
from planaria.wire.messages import Member

# Of the process or of the moment. A full disk or a missing file is there for the next one, too.
PASSING = {
    errno.EAGAIN,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


def supervisor_is_gone() -> bool:
    """Whether it ended before the kernel was asked to tell: nobody holds the other end."""
    standard_input = select.poll()
    standard_input.register(0, 0)
    return bool(standard_input.poll(0))


def _end(code: int, last_words: str) -> NoReturn:
    """At once: the heart has stopped, and who is slow to leave is taken for a failure.

    Its last words may find no room on the disk, which must not keep it from leaving.
    """
    with contextlib.suppress(OSError):
        print(last_words, file=sys.stderr, flush=True)
    os._exit(code)


def main() -> int:
    raise_descriptor_limit()
    role, *rest = sys.argv[1:]
    if role == "alone":
        from planaria.cluster import alone

        return alone.main(rest)
    if role == "script":
        return _run_script(rest)
    if role == "nursery":
        _end_with_the_supervisor(signal.SIGKILL)
        if supervisor_is_gone():
            return EXIT_ORPHAN
        serve(rest[0], work)
        return 0
    folder, member, *number = rest
    return work(folder, role, member, int(number[0]) if number else None)


def _run_script(command: list[str]) -> int:
    """A user's script. What it raises ends the job, unless another process may be spared it."""
    _end_with_the_supervisor(signal.SIGKILL)
    try:
        run_script(command)
    except JobOver as over:
        _end(EXIT_FENCED if str(over) == FENCED else EXIT_DONE, str(over))
    except SystemExit as left:
        if not left.code or not _is_training():
            raise
        given = left.code if isinstance(left.code, str) else f"sys.exit({left.code!r})"
        _tell([f"{given}\n"])
        os._exit(EXIT_REFUSED)
    except BaseException as error:  # and what passes for Ctrl-C: that would not reach this process
        # Our own script has nothing wrong in it but what the data or the settings have.
        ours = command[0] == str(INCLUDED) and isinstance(error, PlanariaError)
        _tell([f"{error}\n"] if ours else _their_traceback(error, command[0]))
        # At once: what the script holds must not seem to be done with.
        os._exit(EXIT_FAILED if _may_pass(error) else EXIT_REFUSED)
    return EXIT_DONE


def _may_pass(error: BaseException) -> bool:
    """Whether it lacked something that the process which replaces it may have: memory,
    descriptors, a disk that answers. If it has not, the job ends then.
    """
    cause = error.__cause__ if isinstance(error, DataError) else error
    return isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in PASSING)


def _is_training() -> bool:
    connecting = sys.modules.get("planaria.torch.connecting")  # unless the script has no job
    return connecting is not None and connecting.is_training()


def _their_traceback(error: BaseException, script: str) -> list[str]:
    """From the script on: what runs it is not the user's business."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    return traceback.format_exception(error.with_traceback(frames or error.__traceback__))


def _tell(lines: list[str]) -> None:
    """By the line to whoever has started this, who shows it once for all ranks."""
    message = encode(Raised("".join(lines)))
    try:
        os.write(int(os.environ[SOCKET]), message)
    except OSError:
        sys.stderr.writelines(lines)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the script may have closed it
            stream.flush()


def _end_with_the_supervisor(told: signal.Signals) -> None:
    """However it ends, the kernel tells us. Ctrl-C is its to handle."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def work(folder: str, role: str, member: Member, number: int | None) -> int:
    """What a process does until its end; returns its exit code."""
    files = JobFiles(Path(folder))
    # What is forked has its nursery's command line: by this, and by its log, it can be told.
    ctypes.CDLL(None).prctl(PR_SET_NAME, member.encode())
    # A coordinator beside the supervisor stays to clean up; if it is frozen, it is woken for that.
    stays = role == "coordinator" and not files.is_copy
    _end_with_the_supervisor(signal.SIGCONT if stays else signal.SIGKILL)
    if not stays and supervisor_is_gone():
        return EXIT_ORPHAN
    try:
        if role == "coordinator":
            from planaria.cluster.coordinator_node import CoordinatorNode

            CoordinatorNode(files, member).run()
            return 0
        if role == "server":
            from planaria.cluster.server_node import ServerNode

            reason = ServerNode(files, member, number).run()
        else:
            from planaria.cluster import built_in

            reason = built_in.run(files, member, number)
    except JobOver as error:
        reason = str(error)
    except DataError as error:  # another process would read the same, if it can read at all
        _end(EXIT_FAILED if _may_pass(error) else EXIT_REFUSED, str(error))
    except (CheckpointError, TierError) as error:  # another process may be able to read it
        _end(EXIT_FAILED, str(error))
    except Exception:
        _end(EXIT_FAILED, traceback.format_exc().rstrip())
    return EXIT_FENCED if reason == FENCED else 0


if __name__ == "__main__":
    sys.exit(main())
