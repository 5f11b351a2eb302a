"""What trainers agree on in a step, as one vector: the mean of their gradients, rank 0's buffers.

Trainers sum vectors of float32, in rank order. What such a sum would round travels as bits: cut
into 16-bit pieces, which float32 holds exactly, with zeros from everybody else.

    floats                         what
    one for each number            gradients, but for those of 64-bit numbers: their sums
    one for each parameter         how many ranks have a gradient of it
    one for each two bytes         buffers, rank 0's
    the same for each rank         its own: what it says, and its gradients of 64-bit numbers

A parameter that no trainer has used keeps having no gradient, and torch's optimizers pass it over.
Buffers that forward changes, such as the running means of a BatchNorm, are rank 0's everywhere, as
under torch's DistributedDataParallel. Only parameters that require gradients now are there, so what
is frozen costs nothing, and what is unfrozen in the loop is averaged from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import nn

from planaria.errors import StateError
from planaria.kernels.types import Bytes, Floats
from planaria.torch.frozen import in_order
from planaria.torch.replicas import MARK_BYTES

WIDE = frozenset((torch.float64, torch.complex128))  # a sum of float32 would round these
PIECE_BYTES = 2


class DenseGradients:
    """The parameters and buffers of the modules that are kept, each once, in order of names."""

    def __init__(self, kept: Mapping[str, object], trainers: int, most: int = 0) -> None:
        """most: so many trainers there may be later."""
        self._modules = {name: one for name, one in kept.items() if isinstance(one, nn.Module)}
        self.trainers = trainers
        named = [pair for name, one in self._modules.items() for pair in one.named_parameters(name)]
        named = [pair for pair in named if _can_learn(pair[1])]
        self._names = {id(one): name for name, one in reversed(named)}
        self.parameters = list({id(one): one for _, one in named}.values())
        self._buffer_shapes = _shapes(self._named_buffers())
        said_bytes = MARK_BYTES * len(kept)
        self.size = _Layout(self.parameters, self._buffers(), said_bytes, max(trainers, most)).size
        """Of the vector while all parameters require gradients: it is never longer."""

    def on_backward(self, call: Callable[[], None]) -> None:
        """Calls this whenever a gradient has come in a backward, of frozen parameters as well once
        they are unfrozen."""
        for one in self.parameters:
            requires_grad = one.requires_grad
            one.requires_grad_(True)  # torch takes no hooks of others, but keeps them
            one.register_post_accumulate_grad_hook(lambda _: call())
            one.requires_grad_(requires_grad)

    def collect(self, rank: int, said: bytes = b"") -> Floats:
        """What this trainer contributes: a new float32[at most size].

        said: MARK_BYTES for each object that is kept, for `heard` of all ranks.
        """
        self._check()
        trained = [one for one in self.parameters if one.requires_grad]
        layout = self._now = _Layout(trained, self._buffers(), len(said), self.trainers)
        vector = np.zeros(layout.size, np.float32)
        flat = torch.from_numpy(vector)
        for parameter, part in _parts(layout.narrow, flat):
            if parameter.grad is not None:
                part.copy_(_as_real(parameter.grad))
        vector[layout.flags] = [one.grad is not None for one in layout.trained]
        if rank == 0:
            vector[layout.buffers] = _pieces([_bytes_of(one) for one in layout.tensors])
        own = [np.frombuffer(self._trained_mark(trained) + said, np.uint8)]
        for one in layout.wide:
            own.append(_bytes_of(torch.zeros_like(one) if one.grad is None else one.grad))
        vector[layout.own(rank)] = _pieces(own)
        return vector

    def heard(self, total: Floats) -> list[bytes]:
        """What each rank has said, out of the sum over all of them."""
        if len(total) != self._now.size:
            raise StateError(OTHERS_TRAINED)
        all_said = [_bytes_in(total[self._now.own(rank)]) for rank in range(self.trainers)]
        said = [one[: self._now.said_bytes].tobytes() for one in all_said]
        if len({one[:MARK_BYTES] for one in said}) > 1:
            raise StateError(OTHERS_TRAINED)
        return [one[MARK_BYTES:] for one in said]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def spread(self, total: Floats) -> None:
        """The sum over all trainers, made everybody's."""
        layout = self._now
        mean = torch.from_numpy(total[: layout.flags.start] / np.float32(self.trainers))
        means = {id(one): part for one, part in _parts(layout.narrow, mean)}
        means |= {id(one): part for one, part in _parts(layout.wide, self._wide_mean(total))}
        present = (total[layout.flags] > 0).tolist()
        for anybody, parameter in zip(present, layout.trained, strict=True):
            if not anybody:
                continue
            part = means[id(parameter)]
            if parameter.is_complex():
                part = torch.view_as_complex(part)
            if parameter.grad is None:
                parameter.grad = part.to(parameter, copy=True)
            else:
                parameter.grad.copy_(part)
        rest, first = _bytes_in(total[layout.buffers]), 0
        for buffer in layout.tensors:
            part = rest[first : first + buffer.nbytes]
            first += buffer.nbytes
            # What is alike is not written: a graph that somebody holds may have saved it.
            if not np.array_equal(part, _bytes_of(buffer)):
                values = torch.from_numpy(part.copy()).view(buffer.dtype)
                buffer.copy_(values.view(buffer.shape))

    def _wide_mean(self, total: Floats) -> torch.Tensor:
        """Summed here, in rank order like all others."""
        layout = self._now
        ranks = [_bytes_in(total[layout.own(rank)]) for rank in range(self.trainers)]
        count = 8 * sum(_numbers(one) for one in layout.wide)
        first = layout.said_bytes
        numbers = [one[first : first + count].copy().view(np.float64) for one in ranks]
        summed = numbers[0]
        for other in numbers[1:]:
            summed = summed + other
        return torch.from_numpy(summed / self.trainers)

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        """Of now: forward may have put other tensors into their places."""
        named = [pair for name, one in self._modules.items() for pair in one.named_buffers(name)]
        # One without plain bytes, such as a sparse matrix that is not persistent, stays as it is.
        return {name: one for name, one in named if one.layout == torch.strided}

    def _buffers(self) -> list[torch.Tensor]:
        return list({id(one): one for one in self._named_buffers().values()}.values())

    def _trained_mark(self, trained: Sequence[torch.Tensor]) -> bytes:
        names = "\n".join(self._names[id(one)] for one in trained)
        return blake2b(names.encode(), digest_size=MARK_BYTES).digest()

    def _check(self) -> None:
        """Refuses what the other ranks could not take."""
        if (shapes := _shapes(self._named_buffers())) != self._buffer_shapes:
            changed = dict(set(shapes.items()) ^ set(self._buffer_shapes.items()))
            raise StateError(
                f"{', '.join(sorted(changed))}: a buffer has another shape or dtype than before "
                "the loop, or is new; make buffers of their final size before they are kept"
            )
        for one in self.parameters:
            if one.requires_grad and one.grad is not None and one.grad.layout != torch.strided:
                raise StateError(
                    f"the gradient of {self._names[id(one)]} is sparse, and several trainers "
                    "average dense ones: make it with sparse=False, or use "
                    "planaria.torch.EmbeddingBag, whose rows live on servers"
                )


OTHERS_TRAINED = (
    "ranks train different parameters: requires_grad differs between them; freeze and unfreeze "
    "on all ranks alike, by job.step >= N rather than ==, because a trainer that takes a place "
    "begins at any step"
)


class _Layout:
    """Where everything lies in the vector of a step."""

    def __init__(
        self,
        trained: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        said_bytes: int,
        trainers: int,
    ) -> None:
        self.trained = trained
        self.narrow = [one for one in trained if one.dtype not in WIDE]
        self.wide = [one for one in trained if one.dtype in WIDE]
        self.tensors = buffers
        self.said_bytes = MARK_BYTES + said_bytes
        first = sum(_numbers(one) for one in self.narrow)
        self.flags = slice(first, first + len(trained))
        held = -(-sum(one.nbytes for one in buffers) // PIECE_BYTES)
        self.buffers = slice(self.flags.stop, self.flags.stop + held)
        wide_bytes = 8 * sum(_numbers(one) for one in self.wide)
        self._own = -(-(self.said_bytes + wide_bytes) // PIECE_BYTES)
        self.size = self.buffers.stop + trainers * self._own

    def own(self, rank: int) -> slice:
        """What this rank alone writes."""
        first = self.buffers.stop + rank * self._own
        return slice(first, first + self._own)


def _shapes(named: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (one.dtype, one.shape) for name, one in named.items()}


def _can_learn(one: torch.Tensor) -> bool:
    """Whole numbers have no gradients, whoever asks for them."""
    return (one.is_floating_point() or one.is_complex()) and not one.is_inference()


def _numbers(one: torch.Tensor) -> int:
    """Real ones."""
    return int(one.numel()) * (2 if one.is_complex() else 1)


def _as_real(values: torch.Tensor) -> torch.Tensor:
    values = values.detach()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """uint8[n], in the order of its numbers."""
    found: Bytes = in_order(tensor).reshape(-1).view(torch.uint8).to("cpu").numpy()
    return found


def _pieces(parts: Sequence[Bytes]) -> Floats:
    """float32[(n + 1) // 2]: the bytes, two in each, as whole numbers."""
    flat = np.concatenate([np.zeros(0, np.uint8), *parts])
    even = np.concatenate([flat, np.zeros(len(flat) % PIECE_BYTES, np.uint8)])
    return even.view(np.uint16).astype(np.float32)


def _bytes_in(pieces: Floats) -> Bytes:
    """The bytes that such pieces were made of, and one more if their number was odd."""
    return pieces.astype(np.uint16).view(np.uint8)


def _parts(
    tensors: Sequence[torch.Tensor], flat: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each with its part of the vector, in its own shape; a pair for each complex number."""
    first = 0
    for one in tensors:
        shape = (*one.shape, 2) if one.is_complex() else one.shape
        yield one, flat[first : first + _numbers(one)].view(shape)
        first += _numbers(one)
