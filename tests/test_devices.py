"""Results go to a device and gradients come from it at the lookup, and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from store_jobs import StoreJob

import planaria.torch
from planaria import Optimizer
from planaria.cluster.run import check_data
from planaria.config import Config
from planaria.errors import ArgumentError, ConfigError, StateError
from planaria.models import predicting
from planaria.torch import (
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    frozen,
    keeping,
)
from planaria.torch.features import bind_all
from planaria.torch.keeping import Keeper

pytestmark = pytest.mark.torch

SOURCES = sorted((Path(__file__).parent.parent / "src" / "planaria" / "torch").glob("*.py"))
CPU = torch.device("cpu")


def makers() -> list[Any]:
    """Each kind of collection, to be made with or without a device."""
    return [
        lambda **more: EmbeddingBag(9, 4, **more),
        lambda **more: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", ["f"])], **more),
        lambda **more: EmbeddingCollection([EmbeddingConfig(9, 4, "t", ["f"])], **more),
    ]


def learn(collection: Any) -> torch.Tensor:
    """One step of a job of this collection; its result."""
    job = StoreJob(Optimizer("sgd", lr=0.1), collection)
    ids = torch.tensor([1, 2, 1], device=CPU)
    lengths = torch.tensor([2, 1], device=CPU)
    if isinstance(collection, EmbeddingBag):
        found = collection(ids, torch.tensor([0, 2], device=CPU))
    else:
        found = collection(KeyedJaggedTensor(["f"], ids, lengths=lengths))
        found = (
            found["f"] if isinstance(collection, EmbeddingBagCollection) else found["f"].values()
        )
    found.sum().backward()
    job.finish()
    return found


@pytest.mark.parametrize("make", makers())
def test_a_collection_returns_on_its_own_device_or_on_the_job_s(make: Any) -> None:
    assert make().device == CPU
    named, other = make(device="cpu"), make()
    assert learn(named).device == named.device == CPU
    elsewhere = torch.device("cpu", 0)  # the only other one that every machine has
    bind_all(
        [other.tables], Optimizer("sgd", lr=0.1), StoreJob(Optimizer("sgd"), make()), elsewhere
    )
    assert other.device == elsewhere


@pytest.mark.parametrize("make", makers())
@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("banana", "device 'banana': torch cannot use it here .* name one that it can"),
        ("cuda:99", "device 'cuda:99': torch cannot use it here"),
        ("meta", "holds no values; .* leave device out"),
    ],
)
def test_a_device_that_is_not_there_is_refused_when_it_is_named(
    make: Any, device: str, says: str
) -> None:
    with pytest.raises(ArgumentError, match=says):
        make(device=device)


def test_a_job_s_device_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"trainer.device: device 'cuda:99': torch cannot use it"):
        planaria.torch.connect(trainer={"device": "cuda:99"})
    with pytest.raises(ConfigError, match=r"trainer.device: expected cpu, cuda, mps or xpu"):
        planaria.torch.connect(trainer={"device": "banana"})
    with pytest.raises(ConfigError, match="the built-in model computes on the CPU"):
        check_data(Config.from_dict({"trainer": {"device": "cuda"}}))


@pytest.mark.parametrize("make", makers())
def test_what_is_on_the_host_is_there_whatever_torch_s_default_device_is(make: Any) -> None:
    """Where the default is `meta`, whatever is made without a device has no values."""
    with torch.device("meta"):
        found = learn(make())
    assert found.device == CPU
    assert found.any()


def test_states_are_kept_on_the_host_whatever_torch_s_default_device_is() -> None:
    layer = torch.nn.Linear(3, 2)
    with torch.device("meta"):
        keeper = Keeper({"layer": layer, "tables": planaria.torch.Adagrad(lr=0.1)})
        keeper.thaw(keeper.freeze())
    assert layer.weight.device == CPU


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_every_kind_of_device_that_is_there_is_seeded_with_a_step(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    seeds: list[int] = []
    asked = torch.backends.mps if kind == "mps" else getattr(torch, kind)
    seeding = "manual_seed" if kind == "mps" else "manual_seed_all"
    monkeypatch.setattr(asked, "is_available", lambda: True)
    monkeypatch.setattr(getattr(torch, kind), seeding, seeds.append)
    keeping._seeding_devices.cache_clear()
    try:
        for step in (1, 2, 1):
            keeping.seed_torch(0, step, 0)
            assert seeds[-1] == torch.default_generator.initial_seed()
    finally:
        keeping._seeding_devices.cache_clear()
    assert seeds[0] == seeds[2] != seeds[1]


def test_a_model_that_was_trained_on_a_gpu_can_be_scored_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As if its tensors had been there when they were packed."""
    node_of = frozen._tensor_node
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(
            frozen,
            "_tensor_node",
            lambda *tensor: ([*node_of(*tensor)[0], "xpu"], *node_of(*tensor)[1:]),
        )
        state = frozen.pack({"model": {"weight": torch.ones(3)}})
    with pytest.raises(StateError, match="XPU"):
        frozen.unpack(state)
    config = Config.from_dict({"model": {"name": "deepfm"}, "trainer": {"device": "xpu"}})
    checkpoint: Any = SimpleNamespace(dense=lambda: {"dense": state})
    found = predicting._dense_state(config, checkpoint, tmp_path)
    assert (found["weight"].device, found["weight"].tolist()) == (CPU, [1, 1, 1])


def is_moved(call: ast.Call) -> bool:
    """Whether a chain of calls has .to("cpu", ...) in it, or makes its tensor there."""
    text = ast.unparse(call)
    return ".to('cpu'" in text or "device='cpu'" in text or "device=CPU" in text


def unmoved(text: str) -> list[str]:
    """The calls of .numpy() that do not say that their tensor is on the CPU."""
    tree = ast.parse(text)
    made = {
        ast.unparse(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and is_moved(node.value)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "numpy"
        if not is_moved(call) and ast.unparse(call.func.value) not in made
    ]


def test_no_tensor_becomes_an_array_before_it_is_on_the_host() -> None:
    assert {
        path.name: unmoved(path.read_text()) for path in SOURCES if unmoved(path.read_text())
    } == {}
    assert sum(path.read_text().count(".numpy()") for path in SOURCES) >= 3
    assert unmoved("a = weights.detach().numpy()") == ["weights.detach().numpy()"]  # control
