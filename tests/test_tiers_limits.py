"""A limit of memory is kept, and what is wrong with one is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planaria.cluster.server_node import resident_bytes
from planaria.config import Config
from planaria.errors import ConfigError
from planaria.records import TieredRecords
from planaria.records.budget import ArenaNeeds, server_needs, slots_within


def test_a_limit_of_memory_is_kept_and_used() -> None:
    arenas = [ArenaNeeds(1_000_000, 128, 2000), ArenaNeeds(300_000, 17, 50)]
    needs = server_needs(arenas, 10_000_000)
    assert needs.least < needs.all
    for ram in range(needs.least, needs.all, 10_000_000):
        slots = slots_within(ram, arenas, needs.history)
        used = needs.history + sum(
            arena.fixed_bytes + count * arena.slot_bytes
            for arena, count in zip(arenas, slots, strict=True)
        )
        assert used <= ram
        assert used > ram - 1000 or slots == (1_000_000, 300_000)
        assert all(count >= arena.step_rows for count, arena in zip(slots, arenas, strict=True))


def test_what_is_in_memory_is_what_was_counted(tmp_path: Path) -> None:
    """A store of which a tenth may be in memory takes not much more, whatever is done with it."""
    words, count = 128, 100_000
    needs = ArenaNeeds(count, words, 0)
    before = resident_bytes()
    records = TieredRecords(str(tmp_path), words, count, count // 10)
    draw = np.random.default_rng(0)
    for _ in range(40):
        index = np.unique(draw.integers(0, count, 2000))
        records.add(index, None, np.ones((len(index), words), np.uint32))
    counted = needs.fixed_bytes + count // 10 * needs.slot_bytes
    assert resident_bytes() - before < counted + (12 << 20)  # values of a call, stacks of threads
    assert counted < 4 * words * count / 5


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("64GB", 64 * 10**9),
        ("1.5GiB", 3 << 29),
        ("10 mb", 10**7),
        ("4096", 4096),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_have_units(given: str, size: int) -> None:
    config = Config.load(None, [f"tier.ram={given}", "tier.path=somewhere"])
    assert config.tier.ram == size


@pytest.mark.parametrize("given", ["64 gigabytes", "0", "-1GB", "1.5", "2PB"])
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"tier\.ram: expected null or a size such as 64GB"):
        Config.load(None, [f"tier.ram={given}", "tier.path=somewhere"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["tier.ram=1GB"], r"tier\.path: expected a folder of a local disk, because tier\.ram"),
        (["tier.path=x"], r"tier\.path: expected null, unless tier\.ram"),
        (
            ["tier.ram=1GB", "tier.path=x", "strategy=cpr", "cpr.variant=scar",
             "checkpoint.path=y", "checkpoint.every_steps=9"],
            r"cpr\.variant: expected vanilla, mfu or ssu",
        ),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config.load(None, overrides)
