"""DLRM's interaction: every level gives the twin's bits, torch's operations give the same numbers,
and bad arguments are refused before anything is written."""

import inspect
from unittest.mock import Mock

import numpy as np
import pytest
from small_arrays import floats
from test_arguments import Kernel, never_crashes, refused, wrong_kinds
from test_kernels import DIMS, THREADS, everywhere, numbers, run_case

from planaria import kernels
from planaria.errors import ArgumentError
from planaria.kernels import interactions
from planaria.kernels.types import Floats

SAMPLES = 5 * 64 + 7  # a thread takes 64 samples or more: five threads all get some
# fmt: off
KERNELS = {
    "interact": Kernel(
        interactions.interact,
        lambda: {"first": floats(2, 3), "rest": floats(2, 4, 3), "out": floats(2, 13)},
        written=("out",), may_be_none=("out",),
    ),
    "interact_backward": Kernel(
        interactions.interact_backward,
        lambda: {"grads": floats(2, 13), "first": floats(2, 3), "rest": floats(2, 4, 3)},
    ),
}
# fmt: on


@pytest.mark.parametrize("count", [1, 2, 16, 17, 34])  # sixteen are multiplied at a time
@pytest.mark.parametrize("dim", DIMS)
def test_every_level_gives_the_bits_of_the_twin(dim: int, count: int) -> None:
    rng = np.random.default_rng(100 * dim + count)
    samples = SAMPLES if count == 17 else 3
    rest, one = numbers(rng, samples, count, dim), numbers(rng, samples, dim)
    case = []
    for first in (None, one):
        width = interactions.interact(first, rest).shape[1]
        grads = numbers(rng, samples, width)
        case += [
            (interactions.interact, first, rest),
            (interactions.interact_backward, grads, first, rest),
        ]
    everywhere(lambda: run_case(case), THREADS)


def test_no_sample_has_no_result(level: str) -> None:
    none: Floats = np.empty((0, 3, 4), np.float32)
    assert interactions.interact(None, none).shape == (0, 3)
    assert interactions.interact_backward(np.empty((0, 3), np.float32), None, none)[1].size == 0


@pytest.mark.torch
@pytest.mark.parametrize("with_first", [True, False])
def test_torch_gives_the_same_numbers(with_first: bool) -> None:
    torch = pytest.importorskip("torch")
    from planaria.trainer.interaction import interaction

    torch.manual_seed(1)
    first = torch.randn(50, 16, dtype=torch.float64, requires_grad=True) if with_first else None
    rest = torch.randn(50, 16 * 26, dtype=torch.float64, requires_grad=True)
    inputs = [rest] if first is None else [first, rest]
    vectors = rest.unflatten(1, (26, 16))
    expected = interaction(first, vectors)  # of other dtypes: by torch alone
    found = interaction(first.float() if first is not None else None, vectors.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, weights)
    got = torch.autograd.grad(found, inputs, weights.float())
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.torch
def test_vectors_of_several_kinds_are_left_to_torch() -> None:
    """What a network computes under autocast has another dtype than the rows of tables."""
    torch = pytest.importorskip("torch")
    from planaria.trainer.interaction import interaction

    first, rest = torch.randn(7, 4), torch.randn(7, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = interaction(first.bfloat16(), rest)
    torch.testing.assert_close(mixed.float(), interaction(first, rest), rtol=0.05, atol=0.1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert interaction(first, rest).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.torch
def test_vectors_may_lie_anywhere_in_memory() -> None:
    torch = pytest.importorskip("torch")
    from planaria.trainer.interaction import interaction

    first, rest = torch.randn(7, 4), torch.randn(7, 3, 4)
    apart = torch.randn(3, 7, 4, 2)
    apart[..., 1] = rest.transpose(0, 1)
    spread = apart[..., 1].transpose(0, 1).requires_grad_()
    assert not spread.is_contiguous()
    result = interaction(first, spread)
    assert torch.equal(result, interaction(first, rest))
    result.sum().backward()  # whose gradient is one number, expanded
    assert spread.grad is not None


# ---------------------------------------------------------------------------- bad arguments


def test_every_public_kernel_is_held_to_this() -> None:
    functions = inspect.getmembers(interactions, inspect.isfunction)
    own = {name for name, function in functions if function.__module__ == interactions.__name__}
    assert {name for name in own if not name.startswith("_")} == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_arrays_that_do_not_fit_are_refused(level: str, name: str) -> None:
    kernel = KERNELS[name]
    kernel.call(**kernel.arrays())
    for which, value in kernel.arrays().items():
        for change, wrong, says in wrong_kinds(value, which in kernel.written):
            if wrong is None and which in (*kernel.may_be_none, "first"):
                continue
            arguments = {**kernel.arrays(), which: wrong}
            refused(kernel, arguments, ArgumentError, says, f"{which} with {change}")
        for axis in range(value.ndim):
            longer = np.concatenate([value, value.take([-1], axis)], axis)
            arguments = {**kernel.arrays(), which: longer}
            refused(kernel, arguments, ArgumentError, "", f"{which} longer in dimension {axis}")


def test_without_vectors_there_is_nothing_to_multiply(level: str) -> None:
    for shape in ((2, 0, 3), (2, 3, 0)):
        with pytest.raises(ArgumentError, match="a sample needs one or more"):
            interactions.interact(None, np.empty(shape, np.float32))


@pytest.mark.parametrize("name", KERNELS)
def test_the_native_module_never_crashes_on_wrong_shapes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spy = Mock(wraps=pytest.importorskip("planaria._native"))
    monkeypatch.setattr(kernels, "native", spy)
    never_crashes(KERNELS[name], name, spy)
