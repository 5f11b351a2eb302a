"""The dense network: its state is a record like any other, and its gradients are torch's."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from planaria import Optimizer, kernels
from planaria.dense import KEEP, DenseCopies, keepers, part_of, sum_in_rank_order
from planaria.errors import ArgumentError, StepError
from planaria.kernels.types import Floats
from planaria.optimizers import NAMES
from planaria.tables import MAX_TABLES
from planaria.trainer.dense import DENSE_TABLE, DIGEST_WORDS, DenseState, Layer, initial_weights
from planaria.trainer.dlrm import DLRM

PARAMETERS = 3 * DIGEST_WORDS + 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The number of threads is part of a job's configuration; here it is one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gradient(step: int, size: int = PARAMETERS) -> Floats:
    return np.random.default_rng(step).normal(size=size).astype(np.float32)


def dense_state(optimizer: Optimizer | None = None, *, steps: int = 0) -> DenseState:
    optimizer = optimizer or Optimizer("adagrad", lr=0.05)
    state = DenseState(PARAMETERS, optimizer, initial=gradient(99))
    for step in range(1, steps + 1):
        state.apply(step, gradient(step))
    return state


# ---------------------------------------------------------------------------- the state


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_state_goes_on_with_the_same_bits(name: str) -> None:
    optimizer = Optimizer(name, lr=0.05, weight_decay=0.01)
    first = dense_state(optimizer, steps=4)
    second = dense_state(optimizer)
    weights = second.weights
    exported = first.export()
    second.restore(4, exported)
    assert second.step == 4
    for step in range(5, 9):
        first.apply(step, gradient(step), lr=0.1 / step)
        second.apply(step, gradient(step), lr=0.1 / step)
    np.testing.assert_array_equal(first.export(), second.export())
    np.testing.assert_array_equal(weights, second.weights)
    assert np.may_share_memory(weights, second.weights)
    assert first.digest() == second.digest()
    first.restore(4, exported)  # what was exported is a copy
    assert first.digest() == dense_state(optimizer, steps=4).digest() != second.digest()


def test_a_state_is_restored_from_wherever_its_bytes_lie() -> None:
    """Those of a message start anywhere, and a trainer that was replaced refused them."""
    state = dense_state(steps=3)
    expected = state.digest()
    room = np.zeros(4 * state.words + 1, np.uint8)
    room[1:] = state.export()
    state.apply(4, gradient(4))
    state.restore(3, room[1:])
    assert state.digest() == expected


def test_a_refused_step_changes_nothing() -> None:
    state = dense_state(steps=2)
    before = state.digest()
    with pytest.raises(StepError, match="send 3"):
        state.apply(2, gradient(2))
    with pytest.raises(ArgumentError, match="shape"):
        state.apply(3, gradient(3)[1:])
    with pytest.raises(ArgumentError, match="float32"):
        state.apply(3, np.zeros(PARAMETERS))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="shape"):
        state.restore(7, state.export()[1:])
    assert (state.step, state.digest()) == (2, before)


def test_rowwise_adagrad_is_adagrad_here() -> None:
    rowwise = dense_state(Optimizer("rowwise_adagrad", lr=0.05), steps=3)
    assert rowwise.digest() == dense_state(Optimizer("adagrad", lr=0.05), steps=3).digest()


def test_the_digest_changes_with_any_bit() -> None:
    state = dense_state(Optimizer("adam"), steps=2)
    exported = state.export().view(np.uint32)
    assert state.words == len(exported) == 3 * PARAMETERS + 1
    seen = {state.digest()}
    rng = np.random.default_rng(0)
    for word in [0, PARAMETERS, len(exported) - 1, *rng.integers(0, len(exported), 60)]:
        changed = exported.copy()
        changed[word] ^= np.uint32(1 << int(rng.integers(32)))
        state.restore(2, changed.view(np.uint8))
        seen.add(state.digest())
    assert len(seen) == 64
    swapped = exported.copy()
    swapped[:DIGEST_WORDS], swapped[DIGEST_WORDS : 2 * DIGEST_WORDS] = (
        exported[DIGEST_WORDS : 2 * DIGEST_WORDS],
        exported[:DIGEST_WORDS],
    )
    state.restore(2, swapped.view(np.uint8))
    assert state.digest() not in seen
    assert MAX_TABLES <= DENSE_TABLE < 2**24 - 1


def test_native_and_numpy_agree() -> None:
    def both() -> tuple[str, bytes]:
        state = dense_state(Optimizer("adam"), steps=3)
        return str(state.digest()), initial_weights([Layer(13, 9), Layer(9, 4)], 5).tobytes()

    level = kernels.level()
    expected = both()
    try:
        kernels.select_level("numpy")
        assert both() == expected
    finally:
        kernels.select_level(level)


def test_initial_weights_have_dlrms_deviations_and_come_from_the_seed_alone() -> None:
    layers = [Layer(200, 300), Layer(200, 300)]
    weights = initial_weights(layers, 11)
    first, second = np.split(weights, 2)
    assert not np.isin(first, second).all()
    assert abs(first[:60_000].std() / (2 / 500) ** 0.5 - 1) < 0.02
    assert abs(first[60_000:].std() / (1 / 300) ** 0.5 - 1) < 0.15
    assert abs(first.mean()) < 0.002
    np.testing.assert_array_equal(weights, initial_weights(layers, 11))
    np.testing.assert_array_equal(first, initial_weights(layers[:1], 11))
    assert not np.isin(initial_weights(layers, 12), weights).all()


def torch_optimizer(name: str, parameter: Any) -> Any:
    if name == "adam":
        return torch.optim.Adam([parameter], lr=0.05, weight_decay=0.01, eps=1e-10)
    if name == "adagrad":
        return torch.optim.Adagrad([parameter], lr=0.05, weight_decay=0.01)
    momentum = 0.9 if name == "momentum" else 0.0
    return torch.optim.SGD([parameter], lr=0.05, weight_decay=0.01, momentum=momentum)


def ulps_from_torch_optim() -> dict[str, float]:
    """The largest distance of a weight from torch's over 20 steps.

    In ulps of the largest value that the weight has had: a weight that comes close to zero keeps
    the rounding errors of where it was.
    """
    return {name: _ulps_from_torch_optim(name) for name in ("sgd", "momentum", "adagrad", "adam")}


def _ulps_from_torch_optim(name: str) -> float:
    state = dense_state(Optimizer(name, lr=0.05, weight_decay=0.01))
    parameter = torch.from_numpy(state.weights.copy()).requires_grad_()
    optimizer = torch_optimizer(name, parameter)
    largest, ulps = np.abs(state.weights), 0.0
    for step in range(1, 21):
        state.apply(step, gradient(step))
        parameter.grad = torch.from_numpy(gradient(step))
        optimizer.step()
        theirs: Floats = parameter.detach().numpy()
        largest = np.maximum(largest, np.abs(theirs))
        ulps = max(ulps, float((np.abs(state.weights - theirs) / np.spacing(largest)).max()))
    return ulps


def in_a_fresh_process(call: str, **environment: str) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch, test_dense; torch.set_num_threads(1); "
            f"torch.use_deterministic_algorithms(True); print(test_dense.{call})",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parent,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_steps_are_torch_optims() -> None:
    # Torch's default code path has no fused multiply-adds, which round once where we round twice.
    # What is left is its sqrt, which MKL does not round correctly.
    found = in_a_fresh_process("ulps_from_torch_optim()", ATEN_CPU_CAPABILITY="default")
    ulps = ast.literal_eval(found)
    assert ulps["sgd"] == ulps["momentum"] == 0
    assert max(ulps["adagrad"], ulps["adam"]) <= 4, ulps


def test_contributions_are_summed_in_rank_order() -> None:
    big, small = np.full(4, 1e8, np.float32), np.full(4, 1.0, np.float32)
    np.testing.assert_array_equal(sum_in_rank_order([big, -big, small]), small)
    np.testing.assert_array_equal(sum_in_rank_order([small, big, -big]), np.zeros(4))
    parts = [gradient(rank) for rank in range(5)]
    total = sum_in_rank_order(parts)
    assert total.tobytes() != sum_in_rank_order(parts[::-1]).tobytes()
    assert total[7:50].tobytes() == sum_in_rank_order([part[7:50] for part in parts]).tobytes()
    np.testing.assert_array_equal(parts[0], gradient(0))  # its arguments are not written
    with pytest.raises(ArgumentError, match="no rank contributed"):
        sum_in_rank_order([])
    with pytest.raises(ArgumentError, match="rank 1"):
        sum_in_rank_order([parts[0], parts[1][1:]])


# ---------------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("parity", "trainers", "servers"), [(0, 1, 0), (3, 1, 3), (2, 2, 1), (1, 5, 0)]
)
def test_trainers_and_keepers_are_one_more_than_the_parity(
    parity: int, trainers: int, servers: int
) -> None:
    assert keepers(parity, trainers) == servers


def test_copies_of_the_last_steps_are_kept_and_no_others() -> None:
    copies = DenseCopies()
    assert not copies
    assert copies.step == 0
    states = {step: np.full(3, step, np.uint8) for step in range(4, 9)}
    for step, state in states.items():
        copies.put(step, state)
        assert copies.step == step
        assert copies.as_of(step) is state
    assert copies
    assert sorted(copies.states) == [9 - KEEP, 8]
    assert copies.as_of(8 - KEEP) is None
    again = DenseCopies()
    again.put(0, states[4])  # that of a job which has not taken a step
    assert again


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("parameters", [0, 1, 2, 6, 7, 100])
def test_the_parts_of_a_vector_are_all_of_it(parameters: int, parts: int) -> None:
    whole = np.arange(parameters)
    cut = [whole[part_of(parameters, part, parts)] for part in range(parts)]
    np.testing.assert_array_equal(np.concatenate(cut), whole)
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


# ---------------------------------------------------------------------------- the model

TABLES, DIM = 5, 6


def model_and_state(seed: int = 3, optimizer: Optimizer | None = None) -> tuple[DLRM, DenseState]:
    model = DLRM(TABLES, DIM, bottom=(24, 10), top=(20, 9))
    state = DenseState(
        model.parameters, optimizer or Optimizer("adagrad"), initial=model.initial_weights(seed)
    )
    model.bind(state.weights)
    return model, state


def batch(n: int, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(n, 13)).astype(np.float32),
        rng.normal(size=(n, TABLES, DIM)).astype(np.float32),
        (rng.random(n) < 0.3).astype(np.float32),
    )


def plain_logits(flat: Any, dense: Any, embeddings: Any) -> Any:
    """DLRM written down plainly: slices of the flat vector, loops over pairs of tables."""
    at = 0

    def linear(x: Any, outputs: int) -> Any:
        nonlocal at
        inputs = x.shape[1]
        weights = flat[at : at + inputs * outputs].reshape(outputs, inputs)
        at += inputs * outputs
        biases = flat[at : at + outputs]
        at += outputs
        return x @ weights.T + biases

    x = dense
    for outputs in (24, 10, DIM):
        x = linear(x, outputs).clamp(min=0)
    vectors = [x, *(embeddings[:, table] for table in range(TABLES))]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(TABLES + 1) for j in range(i)]
    y = torch.cat([x, torch.stack(pairs, dim=1)], dim=1)
    for outputs in (20, 9):
        y = linear(y, outputs).clamp(min=0)
    y = linear(y, 1)
    assert at == len(flat)
    return y[:, 0]


def test_logits_and_gradients_are_those_of_the_plain_formula() -> None:
    model, state = model_and_state()
    dense, embeddings, labels = batch(40)
    ours = model.step(dense, embeddings, labels, global_batch=100)
    flat = torch.from_numpy(state.weights).double().requires_grad_()
    leaf = torch.from_numpy(embeddings).double().requires_grad_()
    logits = plain_logits(flat, torch.from_numpy(dense).double(), leaf)
    targets = torch.from_numpy(labels).double()
    loss = -(targets * F.logsigmoid(logits) + (1 - targets) * F.logsigmoid(-logits)).sum()
    (loss / 100).backward()
    np.testing.assert_allclose(ours.logits, logits.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert abs(ours.loss_sum - float(loss.detach())) < 1e-4 * ours.loss_sum
    np.testing.assert_allclose(ours.dense, flat.grad.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours.embeddings, leaf.grad.numpy(), rtol=1e-4, atol=1e-6)
    assert ours.dense.dtype == ours.embeddings.dtype == ours.logits.dtype == np.float32
    assert ours.embeddings.flags.c_contiguous
    assert np.count_nonzero(ours.dense) > model.parameters / 2


def test_the_model_sees_every_step_of_the_state() -> None:
    model, state = model_and_state()
    dense, embeddings, labels = batch(8)
    start = state.export()
    first = model.step(dense, embeddings, labels, 8)
    state.apply(1, first.dense)
    second = model.step(dense, embeddings, labels, 8)
    assert not np.array_equal(first.logits, second.logits)
    state.restore(0, start)
    again = model.step(dense, embeddings, labels, 8)
    assert [part.tobytes() for part in first[1:]] == [part.tobytes() for part in again[1:]]


def test_gradients_of_two_trainers_add_up_to_the_batchs() -> None:
    model, _ = model_and_state()
    dense, embeddings, labels = batch(64)
    whole = model.step(dense, embeddings, labels, 64)
    halves = [
        model.step(dense[part], embeddings[part], labels[part], 64)
        for part in (slice(0, 32), slice(32, 64))
    ]
    total = sum_in_rank_order([half.dense for half in halves])
    np.testing.assert_allclose(total, whole.dense, rtol=1e-4, atol=1e-7)
    both = np.concatenate([half.embeddings for half in halves])
    np.testing.assert_allclose(both, whole.embeddings, rtol=1e-4, atol=1e-7)


def at_offset(values: Floats, offset: int) -> Floats:
    """A copy that starts `offset` bytes behind a multiple of 64."""
    room = np.zeros(values.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    copy: Floats = room[start : start + values.nbytes].view(np.float32).reshape(values.shape)
    copy[...] = values
    return copy


def test_bits_do_not_depend_on_where_the_arrays_lie() -> None:
    model, state = model_and_state()
    arrays = batch(33)
    expected = [part.tobytes() for part in model.step(*arrays, 33)[1:]]
    for offset in (0, 4, 16, 36):
        moved = [at_offset(values, offset) for values in arrays]
        found = model.step(moved[0], moved[1], moved[2], 33)
        assert [part.tobytes() for part in found[1:]] == expected
    assert state.weights.ctypes.data % 64 == 0
    with pytest.raises(ArgumentError, match="multiple of 64"):
        model.bind(at_offset(state.weights, 4))


def digests_of_a_job() -> str:
    """Two trainers train for some steps; what they hold then."""
    model, state = model_and_state(optimizer=Optimizer("adam", lr=0.01))
    losses = []
    for step in range(1, 9):
        trainers = [model.step(*batch(n, 10 * step + n), 60) for n in (32, 28)]
        losses.append(sum(trainer.loss_sum for trainer in trainers))
        state.apply(step, sum_in_rank_order([trainer.dense for trainer in trainers]))
    return f"{state.digest()} {losses}"


def test_a_repeated_run_and_a_fresh_process_give_the_same_bits() -> None:
    expected = digests_of_a_job()
    assert digests_of_a_job() == expected
    assert in_a_fresh_process("digests_of_a_job()") == expected


def test_it_learns() -> None:
    model, state = model_and_state(optimizer=Optimizer("adagrad", lr=0.05))
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(2, DIM)).astype(np.float32)  # a table of two rows, stepped by SGD
    losses = []
    for step in range(1, 151):
        dense = rng.normal(size=(128, 13)).astype(np.float32)
        ids = rng.integers(0, 2, size=(128, TABLES))
        labels = ((dense[:, 0] > 0) ^ (ids[:, 0] == ids[:, 1])).astype(np.float32)
        found = model.step(dense, rows[ids], labels, 128)
        losses.append(found.loss_sum / 128)
        state.apply(step, found.dense)
        np.add.at(rows, ids, -found.embeddings)
    assert np.mean(losses[:5]) > 0.6
    assert np.mean(losses[-5:]) < 0.2


def test_what_does_not_fit_is_refused_with_a_sentence() -> None:
    model, state = model_and_state()
    dense, embeddings, labels = batch(8)
    with pytest.raises(ArgumentError, match="dense must have shape"):
        model.step(dense[1:], embeddings, labels, 8)
    with pytest.raises(ArgumentError, match="embeddings must have shape"):
        model.step(dense, embeddings[:, 1:].copy(), labels, 8)
    with pytest.raises(ArgumentError, match="without samples"):
        model.step(dense[:0], embeddings[:0], labels[:0], 8)
    with pytest.raises(ArgumentError, match="more than the whole batch"):
        model.step(dense, embeddings, labels, 7)
    with pytest.raises(ArgumentError, match="shape"):
        model.bind(state.weights[1:])
    with pytest.raises(ArgumentError, match="1 or more"):
        DLRM(TABLES, DIM, bottom=(8, 0))
    with pytest.raises(ArgumentError, match="call bind first"):
        DLRM(TABLES, DIM).step(dense, embeddings, labels, 8)


def test_the_papers_networks_have_their_sizes() -> None:
    kaggle = DLRM(26, 16)
    assert [layer.outputs for layer in kaggle.layers] == [512, 256, 64, 16, 512, 256, 1]
    assert kaggle.layers[4].inputs == 27 * 26 // 2 + 16
    terabyte = DLRM(26, 64, bottom=(512, 256), top=(512, 512, 256))
    assert [layer.outputs for layer in terabyte.layers] == [512, 256, 64, 512, 512, 256, 1]
    assert kaggle.parameters == 475_985
