"""Gradients in 16 bits: each number for itself, and nothing is lost on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cluster_jobs import BeatenRun, Blow, leaving_nothing, tiny, undisturbed
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from planaria.errors import WireError
from planaria.kernels.types import Floats
from planaria.wire.codec import decode, encode
from planaria.wire.messages import NO_VIEW, Push
from planaria.wire.rounding import rounded

TOKEN = bytes(range(16))
HALVES = ("fp16", "bf16")
MANTISSA = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # of which a rounded number is off at most
ANY_FLOATS = arrays(np.float32, st.tuples(st.integers(0, 9), st.integers(1, 5)))


def equal(one: Floats, other: Floats) -> bool:
    return one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kind", HALVES)
@given(values=ANY_FLOATS)
def test_a_number_is_rounded_for_itself_and_only_once(kind: str, values: Floats) -> None:
    found = rounded(values, kind)
    assert equal(rounded(found, kind), found)
    for row, one in zip(values, found, strict=True):  # whatever else is in the array
        assert equal(rounded(row[None], kind)[0], one)


@pytest.mark.parametrize("kind", HALVES)
def test_a_rounded_number_is_near(kind: str) -> None:
    values = np.random.default_rng(0).normal(0, 1, (300, 16)).astype(np.float32)
    found = rounded(values, kind)
    assert (np.abs(found - values) <= MANTISSA[kind] * np.abs(values)).all()
    assert not equal(found, values)  # control


@pytest.mark.parametrize("kind", HALVES)
def test_what_is_no_number_stays_and_the_others_are_rounded_beside_it(kind: str) -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 0.1, 3e38, -0.0, 1e-45]], np.float32)
    found = rounded(values, kind)
    assert np.isnan(found[0, 0])
    assert found[0, 1:3].tolist() == [np.inf, -np.inf]
    assert found[0, 3] == rounded(np.full((1, 1), 0.1, np.float32), kind)[0, 0] != values[0, 3]
    assert np.isfinite(found[0, 4])


# ---------------------------------------------------------------- on the wire


def push(values: Floats) -> Push:
    numbers = np.arange(len(values))
    return Push(view=NO_VIEW, rank=0, step=1, indices=[numbers], gradients=[values], lrs=[0.1])


def sent(values: Floats, kind: str) -> list[Any]:
    return encode(TOKEN, "trainer-0", "tcp://somewhere:1", push(values), gradients=kind)


def as_bytes(frames: list[Any]) -> list[bytes]:
    return [bytes(memoryview(frame).cast("B")) for frame in frames]


@pytest.mark.parametrize("kind", HALVES)
def test_rounded_gradients_take_half_the_bytes_and_come_as_they_are(kind: str) -> None:
    values = rounded(np.random.default_rng(1).normal(0, 1e-3, (200, 16)).astype(np.float32), kind)
    plain, halves = sent(values, "exact"), sent(values, kind)
    assert halves[3].nbytes < 0.52 * plain[3].nbytes
    found = decode(TOKEN, as_bytes(halves)).message
    assert isinstance(found, Push)
    assert equal(found.gradients[0], values)
    values[7, 3] = np.nan
    found = decode(TOKEN, as_bytes(sent(values, kind))).message
    assert isinstance(found, Push)
    assert equal(found.gradients[0], values)


def test_any_changed_byte_of_rounded_gradients_is_refused() -> None:
    frames = as_bytes(sent(rounded(np.ones((64, 4), np.float32), "bf16"), "bf16"))
    draw = random.Random(5)
    for _ in range(2_000):
        damaged = bytearray(frames[3])
        damaged[draw.randrange(len(damaged))] ^= draw.randrange(1, 256)
        with pytest.raises(WireError):
            decode(TOKEN, [*frames[:3], bytes(damaged)])


@pytest.mark.parametrize("shape", [[64, 0], [2**39, 0], [63, 4], [2**29, 4], [2**39, 2**39]])
def test_gradients_of_another_shape_are_refused(shape: list[int]) -> None:
    token, header, *rest = as_bytes(sent(rounded(np.ones((64, 4), np.float32), "bf16"), "bf16"))
    claims = msgspec.msgpack.decode(header)
    (gradients,) = claims[2][4]
    gradients[1] = shape
    with pytest.raises(WireError):
        decode(TOKEN, [token, msgspec.msgpack.encode(claims), *rest])


# ---------------------------------------------------------------- on real processes

JOB = ("batch=256", "steps=40")


@pytest.fixture
def folder() -> Iterator[Path]:
    with leaving_nothing() as folder:
        yield folder


@pytest.mark.torch
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("kind", HALVES)
def test_a_job_with_rounded_gradients_is_exact_under_kills(kind: str) -> None:
    job = (*JOB, f"wire.gradients={kind}")
    assert undisturbed(*job) != undisturbed(*JOB)  # control: they are not what they were
    plan = (Blow(8, ("server:1",)), Blow(16, ("trainer:0",)), Blow(24, ("coordinator",)))
    run = BeatenRun(tiny(*job, "servers=4"), plan)
    report = run.run()
    assert len(run.killed) == len(plan)
    assert report["digest"] == undisturbed(*job)
    pushes = report["sent"]["Push"]
    assert pushes["packed"] < 0.8 * pushes["bytes"]
