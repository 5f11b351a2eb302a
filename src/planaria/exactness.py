"""What a step's bits depend on besides the job: written down with it, compared by whoever joins.

Planaria's own kernels give the same bits on every CPU. Torch does not: ATen's loops, MKL and oneDNN
choose their code, and with it the order of additions, by the CPU that they find and by the number
of threads. So a trainer measures a fingerprint, the job keeps that of the first one, and one that
differs is refused before it has contributed anything.

With `reproducible: portable` the environment of trainers pins every one of these choices to what
all x86 CPUs have, and the CPU is left out of the fingerprint. What was found about each, with the
built-in model on torch 2.13: ATen's level changes bits (loops of the `default` level are plain
C++), MKL's branch does (COMPATIBLE is the one that MKL promises to be equal on all x86 CPUs), the
number of threads does. oneDNN's level changes convolutions, of which the built-in model has none;
glibc's use of FMA changes its math functions (exp of doubles was seen to), and the `default` level
calls them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from planaria.config import Config, Reproducible
from planaria.errors import ExactnessError

if TYPE_CHECKING:
    import torch

PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4",
}
"""What makes torch compute the same bits on all x86 CPUs. Read when a process starts."""
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""A step takes and frees what the one before did; to touch fresh pages for it costs more."""

SETTINGS = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "GLIBC_TUNABLES")
"""Variables that choose code; ATEN_CPU_CAPABILITY shows in the capability that torch tells."""

OF_ONE_CPU = ("MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE")
"""Others, which MKL does not look at under MKL_CBWR=COMPATIBLE."""

LEVELS = ("DEFAULT", "AVX2", "AVX512")  # of ATen on x86, lowest first
CPU_FEATURES = ("avx", "fma", "avx2", "avx512f", "avx512_bf16", "amx_tile")  # what BLAS looks at


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Two trainers with equal ones compute the same bits from the same samples and weights."""

    portable: bool
    torch: str
    capability: str  # ATen's level
    threads: int
    blas: str
    settings: dict[str, str]  # the variables that are set
    libc: str
    machine: str  # architecture and byte order
    cpu: str  # vendor and features; "" where portable, because it must not matter
    probe: str  # digest of a few operations, for what all of the above does not say


def environment(config: Config) -> dict[str, str]:
    """The variables that a trainer's process must be started with, above those of this one.

    MKL and OpenMP may not take fewer threads than told when a machine is busy: their number decides
    the order of additions.
    """
    threads = str(config.threads.trainer)
    fixed = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "OMP_WAIT_POLICY": "passive",
    }
    kept = {name: os.environ.get(name, value) for name, value in KEPT_MEMORY.items()}
    return fixed | kept | (PORTABLE if config.reproducible == "portable" else {})


def measure(mode: Reproducible) -> Fingerprint:
    """Of this process. It must have set its number of torch threads, and imports torch."""
    import torch

    portable = mode == "portable"
    named = SETTINGS if portable else SETTINGS + OF_ONE_CPU
    return Fingerprint(
        portable=portable,
        torch=str(torch.__version__),
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        blas=_blas_of(torch.__config__.show()),
        settings={name: os.environ[name] for name in named if os.environ.get(name)},
        libc=" ".join(platform.libc_ver()).strip(),
        machine=f"{platform.machine()}, {sys.byteorder}-endian",
        cpu="" if portable else _cpu_of(_cpu_info()),
        probe=_probe(),
    )


def check(recorded: Fingerprint | None, mine: Fingerprint, mode: Reproducible) -> list[str]:
    """Refuses a trainer that would compute other bits; with mode `off` says what differs.

    recorded: of the job, or of the checkpoint that it resumes from; None if nobody wrote it down.
    """
    found = [] if recorded is None else differences(mine, recorded)
    if found and mode != "off":
        raise ExactnessError(
            f"this trainer would not compute the same bits as the job did: {'; '.join(found)}. "
            "Or set reproducible=off to go on with other bits"
        )
    return found


def differences(mine: Fingerprint, theirs: Fingerprint) -> list[str]:
    """A sentence for each: what differs, and what to set here to be like them."""
    if mine.portable != theirs.portable:
        mode = "portable" if theirs.portable else "same"
        return [f"the job was started with reproducible={mode}; set it here as well"]
    found = []
    if mine.torch != theirs.torch:
        found.append(f"torch is {mine.torch}, was {theirs.torch}; install torch=={theirs.torch}")
    if mine.machine != theirs.machine:
        found.append(f"the machine is {mine.machine}, was {theirs.machine}; take one like that")
    if mine.capability != theirs.capability:
        found.append(_about_capability(mine, theirs))
    if mine.threads != theirs.threads:
        found.append(
            f"torch has {mine.threads} threads, had {theirs.threads}; "
            f"set threads.trainer={theirs.threads}"
        )
    if mine.blas != theirs.blas:
        found.append(f"BLAS is {mine.blas}, was {theirs.blas}; install the build of torch with it")
    found += _about_settings(mine.settings, theirs.settings)
    if mine.libc != theirs.libc:
        found.append(f"the C library is {mine.libc}, was {theirs.libc}; take the same image")
    if mine.cpu != theirs.cpu:
        found.append(f"the CPU is {mine.cpu}, was {theirs.cpu}; {_ANOTHER_CPU}")
    if not found and mine.probe != theirs.probe:
        found.append(f"a few operations gave {mine.probe}, gave {theirs.probe}; {_ANOTHER_CPU}")
    return found


_ANOTHER_CPU = "take a CPU like that, or start the job with reproducible=portable"


def _about_capability(mine: Fingerprint, theirs: Fingerprint) -> str:
    text = f"torch's CPU capability is {mine.capability}, was {theirs.capability}; "
    both_known = mine.capability in LEVELS and theirs.capability in LEVELS
    if both_known and LEVELS.index(theirs.capability) < LEVELS.index(mine.capability):
        return text + f"set ATEN_CPU_CAPABILITY={theirs.capability.lower()}"
    return text + f"unset ATEN_CPU_CAPABILITY if it is set here, else {_ANOTHER_CPU}"


def _about_settings(mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterable[str]:
    for name in sorted({*mine, *theirs}):
        here, there = mine.get(name), theirs.get(name)
        if here != there:
            advice = f"set {name}={there}" if there else f"unset {name}"
            yield f"{name} is {here or 'not set'}, was {there or 'not set'}; {advice}"


# ------------------------------------------------------------------------------- what is measured


def _blas_of(build: str) -> str:
    """Names and versions of the libraries that multiply matrices, from torch's description."""
    lines = [line.strip(" -") for line in build.splitlines()]
    libraries = [line for line in lines if re.search(r"Math Kernel|MKL-DNN|OpenBLAS|BLIS", line)]
    named = re.search(r"BLAS_INFO=(\w+)", build)
    return ", ".join([named.group(1) if named else "unknown", *libraries])


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _cpu_of(info: str) -> str:
    vendor = re.search(r"^vendor_id\s*: (.*)$", info, flags=re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", info, flags=re.MULTILINE)
    has = set(flags.group(1).split()) if flags else set()
    names = [vendor.group(1)] if vendor else [platform.processor() or "unknown"]
    return " ".join([*names, *(feature for feature in CPU_FEATURES if feature in has)])


def _probe() -> str:
    """Sizes of recommendation models, none of them a multiple of a vector's length."""
    import torch
    from torch.nn.functional import linear

    def numbers(*shape: int) -> torch.Tensor:
        # From whole numbers, exactly: random numbers of torch depend on the level as well.
        count = torch.arange(1, torch.Size(shape).numel() + 1)
        return ((count * 7919 % 8191) - 4095).to(torch.float32).mul(2.0**-11).view(shape)

    digest = hashlib.sha256()
    for samples, inputs, outputs in ((129, 367, 65), (7, 13, 33), (258, 65, 1)):
        x, weights = numbers(samples, inputs), numbers(outputs, inputs).requires_grad_()
        loss = linear(x, weights).mul(0.05).sigmoid().log1p().sum()
        (gradient,) = torch.autograd.grad(loss, weights)
        digest.update(gradient.numpy().tobytes() + loss.detach().numpy().tobytes())
    vectors = numbers(9, 27, 17)
    digest.update(torch.bmm(vectors, vectors.transpose(1, 2)).numpy().tobytes())
    digest.update(numbers(1003).exp().numpy().tobytes())
    return digest.hexdigest()[:16]
