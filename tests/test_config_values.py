"""What follows from the values of a configuration: encryption, learning rates."""

from __future__ import annotations

import math

import pytest

from planaria.config import Config
from planaria.errors import ConfigError


@pytest.mark.parametrize(
    ("transport", "host", "encrypted"),
    [
        ("ipc", "10.0.0.1", False),
        ("tcp", "127.0.0.1", False),
        ("tcp", "127.8.8.8", False),
        ("tcp", "::1", False),
        ("tcp", "Localhost", False),
        ("tcp", "10.0.0.1", True),
        ("tcp", "0.0.0.0", True),
        ("tcp", "localhost.example.org", True),
        ("tcp", "node7", True),
    ],
)
def test_what_can_leave_the_machine_is_encrypted(
    transport: str, host: str, encrypted: bool
) -> None:
    overrides = [f"cluster.transport={transport}", f"cluster.host='{host}'"]
    assert Config.load(None, overrides).cluster.encrypted is encrypted
    for word, forced in (("on", True), ("off", False)):
        config = Config.load(None, [*overrides, f"cluster.encryption={word}"])
        assert config.cluster.encrypted is forced


def test_learning_rates_follow_the_schedule() -> None:
    def rates(schedule: str, warmup: int) -> list[float]:
        keys = ["steps=8", "optimizer.lr=4", f"optimizer.schedule={schedule}"]
        config = Config.load(None, [*keys, f"optimizer.warmup_steps={warmup}"])
        return [config.lr(step) for step in range(1, 10)]

    assert rates("constant", 0) == [4] * 9
    assert rates("constant", 4) == [1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert rates("linear", 0) == [3.5, 3, 2.5, 2, 1.5, 1, 0.5, 0, 0]
    assert rates("linear", 4) == [1, 2, 3, 4, 3, 2, 1, 0, 0]
    assert rates("inverse_sqrt", 0) == [4 * math.sqrt(1 / step) for step in range(1, 10)]
    assert rates("inverse_sqrt", 1) == rates("inverse_sqrt", 0)
    assert rates("inverse_sqrt", 4)[:4] == [1, 2, 3, 4]
    assert rates("inverse_sqrt", 4)[4:] == [4 * math.sqrt(4 / step) for step in range(5, 10)]
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps: expected fewer than steps, 8"):
        rates("linear", 8)
