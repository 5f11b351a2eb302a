"""Who would compute other bits is refused and told what to set; portable bits are equal bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planaria.config import Config
from planaria.errors import ExactnessError
from planaria.exactness import (
    LEVELS,
    OF_ONE_CPU,
    PORTABLE,
    SETTINGS,
    Fingerprint,
    check,
    differences,
    environment,
)

# A process of its own, because all that it is about is read when torch is loaded. The model is that
# of the default configuration: its bits differ between ATen's levels, no larger one is needed.
PROGRAM = """
import hashlib, json, math
import msgspec, numpy as np, torch
from planaria.config import Config
from planaria.exactness import measure
from planaria.optimizers import Optimizer
from planaria.trainer.dense import DenseState
from planaria.trainer.dlrm import DLRM

torch.set_num_threads(1)
model = Config().model
dlrm = DLRM(model.tables, model.dim, model.bottom, model.top)
state = DenseState(dlrm.parameters, Optimizer("adagrad", lr=0.02), initial=dlrm.initial_weights(7))
dlrm.bind(state.weights)
numbers, trained = np.random.default_rng(3), hashlib.sha256()
for step in range(1, 4):
    dense = numbers.standard_normal((128, 13), dtype=np.float32)
    embeddings = numbers.standard_normal((128, model.tables, model.dim), dtype=np.float32)
    found = dlrm.step(dense, embeddings, (dense[:, 0] > 0.5).astype(np.float32), 128)
    state.apply(step, found.dense)
    trained.update(found.embeddings.tobytes() + found.logits.tobytes())
trained.update(state.export().tobytes())
images = torch.from_numpy(numbers.standard_normal((4, 16, 20, 20), dtype=np.float32))
filters = torch.from_numpy(numbers.standard_normal((32, 16, 3, 3), dtype=np.float32))
convolved = torch.nn.functional.conv2d(images, filters).numpy().tobytes()
exponentials = np.array([math.exp(number / 5000 - 20) for number in range(200_000)])
print(json.dumps({
    "dlrm": trained.hexdigest(),
    "convolution": hashlib.sha256(convolved).hexdigest(),
    "exp": hashlib.sha256(exponentials.tobytes()).hexdigest(),
    "same": msgspec.to_builtins(measure("same")),
    "portable": msgspec.to_builtins(measure("portable")),
}))
"""
OWN = {*PORTABLE, *SETTINGS, *OF_ONE_CPU}


@cache
def run(**variables: str) -> dict[str, Any]:
    """What a trainer computes on a machine that has these set, and none of the others."""
    kept = {name: value for name, value in os.environ.items() if name not in OWN}
    env = kept | environment(Config()) | variables
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def levels() -> list[str]:
    """Those of this CPU, as ATEN_CPU_CAPABILITY names them."""
    best = run()["same"]["capability"]
    if best not in LEVELS[1:]:
        pytest.skip(f"torch has no levels to choose from on this CPU ({best})")
    return [level.lower() for level in LEVELS[: LEVELS.index(best) + 1]]


PORTABLE_JOB = Config.load(None, ["reproducible=portable"])


def run_portable(**machine: str) -> dict[str, Any]:
    return run(**(machine | environment(PORTABLE_JOB)))


def test_portable_bits_do_not_depend_on_the_level_of_the_machine() -> None:
    own = [run(ATEN_CPU_CAPABILITY=level) for level in levels()]
    portable = [
        run_portable(ATEN_CPU_CAPABILITY=level, MKL_ENABLE_INSTRUCTIONS=mkl, MKL_CBWR="AUTO")
        for level, mkl in zip(levels(), ("SSE4_2", "AVX2", "AVX512"), strict=False)
    ]
    assert len({found["dlrm"] for found in own}) > 1, "control: without it, levels differ"
    for what in ("dlrm", "convolution", "exp"):
        assert len({found[what] for found in portable}) == 1
    assert all(found["portable"] == portable[0]["portable"] for found in portable)
    assert portable[0]["portable"]["capability"] == "DEFAULT"


@pytest.mark.parametrize(
    ("variable", "what"),
    [
        ("ATEN_CPU_CAPABILITY", "dlrm"),
        ("MKL_CBWR", "dlrm"),
        ("ONEDNN_MAX_CPU_ISA", "convolution"),
        ("GLIBC_TUNABLES", "exp"),
    ],
)
def test_each_variable_of_portable_pins_something_that_depends_on_the_cpu(
    variable: str, what: str
) -> None:
    levels()
    if variable == "GLIBC_TUNABLES" and "glibc" not in run()["same"]["libc"]:
        pytest.skip("another C library")
    others = {name: value for name, value in environment(PORTABLE_JOB).items() if name != variable}
    assert run(**others)[what] != run_portable()[what]


def test_a_fingerprint_differs_where_bits_do_and_travels_as_json() -> None:
    """It may differ where bits happen to agree, as they do on some CPUs with AVX2 and AVX-512."""
    found = [run(ATEN_CPU_CAPABILITY=level) for level in levels()] + [run_portable()]
    assert len({one["dlrm"] for one in found}) > 1
    for one in found:
        for other in found:
            mine, theirs = (msgspec.convert(f["same"], Fingerprint) for f in (one, other))
            assert (mine == theirs) == (one is other)
            assert bool(differences(mine, theirs)) == (one is not other)
            if one["dlrm"] != other["dlrm"]:
                assert mine.probe != theirs.probe


# ------------------------------------------------------------------------------- what is refused

RECORDED = Fingerprint(
    portable=False,
    torch="2.13.0",
    capability="AVX2",
    threads=1,
    blas="mkl, version 2024.2",
    settings={"MKL_CBWR": "AVX2"},
    libc="glibc 2.36",
    machine="x86_64, little-endian",
    cpu="GenuineIntel avx fma avx2",
    probe="0123",
)


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        ({"torch": "2.9.1"}, "torch is 2.9.1, was 2.13.0; install torch==2.13.0"),
        ({"capability": "AVX512"}, "set ATEN_CPU_CAPABILITY=avx2"),
        ({"capability": "DEFAULT"}, "unset ATEN_CPU_CAPABILITY if it is set here, else take a CPU"),
        ({"threads": 4}, "torch has 4 threads, had 1; set threads.trainer=1"),
        ({"blas": "open"}, "BLAS is open, was mkl, version 2024.2"),
        ({"settings": {}}, "MKL_CBWR is not set, was AVX2; set MKL_CBWR=AVX2"),
        (
            {"settings": {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX"}},
            "ONEDNN_MAX_CPU_ISA is AVX, was not set; unset ONEDNN_MAX_CPU_ISA",
        ),
        ({"libc": "glibc 2.40"}, "the C library is glibc 2.40, was glibc 2.36"),
        (
            {"machine": "aarch64, little-endian"},
            "the machine is aarch64, little-endian, was x86_64",
        ),
        ({"cpu": "AuthenticAMD avx"}, "or start the job with reproducible=portable"),
        ({"probe": "4567"}, "a few operations gave 4567, gave 0123; take a CPU like that"),
        ({"portable": True}, "the job was started with reproducible=same; set it here as well"),
    ],
)
def test_a_trainer_that_differs_is_refused_and_told_what_to_set(
    mine: dict[str, Any], says: str
) -> None:
    other = msgspec.structs.replace(RECORDED, **mine)
    for mode in ("same", "portable"):
        with pytest.raises(ExactnessError) as caught:
            check(RECORDED, other, mode)
        assert says in str(caught.value)
    [noted] = check(RECORDED, other, "off")
    assert says in noted


def test_all_differences_are_said_at_once() -> None:
    other = msgspec.structs.replace(RECORDED, torch="2.9.1", threads=2, cpu="", probe="4")
    assert [line.partition(" is ")[0] for line in differences(other, RECORDED)] == [
        "torch", "torch has 2 threads, had 1; set threads.trainer=1", "the CPU"
    ]  # fmt: skip


def test_the_page_shows_what_is_set_and_said() -> None:
    page = (Path(__file__).parent.parent / "docs" / "config.md").read_text()
    other = msgspec.structs.replace(RECORDED, capability="AVX512", threads=4)
    assert "\n".join(differences(other, RECORDED)) in page
    assert all(f"`{name}={value}`" in page for name, value in PORTABLE.items())


def test_equal_trainers_join_and_what_nobody_wrote_down_is_not_compared() -> None:
    assert (
        check(RECORDED, msgspec.convert(msgspec.to_builtins(RECORDED), Fingerprint), "same") == []
    )
    assert check(None, RECORDED, "same") == []


def test_trainers_start_with_their_threads_fixed() -> None:
    plain = environment(Config.load(None, ["threads.trainer=3"]))
    assert plain["OMP_NUM_THREADS"] == plain["MKL_NUM_THREADS"] == "3"
    assert plain["MKL_DYNAMIC"] == "FALSE"
    assert not plain.keys() & PORTABLE.keys()
    assert environment(PORTABLE_JOB).items() >= PORTABLE.items()


def test_nobody_imports_torch_for_the_environment_of_a_trainer() -> None:
    code = "import planaria.exactness, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
