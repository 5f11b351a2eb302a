"""What all tests share: this machine's SIMD levels, markers, nurseries."""

import os
from collections.abc import Iterator

import pytest

from planaria import kernels
from planaria.cluster.nursery import sharing

HELPERS = ("broken_rules", "cluster_commands", "cluster_hangs", "cluster_jobs", "script_jobs")


def pytest_configure(config: pytest.Config) -> None:
    pytest.register_assert_rewrite(*HELPERS)  # what they assert says what it found, as in a test
    config.addinivalue_line("markers", "torch: imports PyTorch; left out under the sanitizers")
    config.addinivalue_line("markers", "campaign: takes long; left out by make test")


@pytest.fixture(params=kernels.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each SIMD level that this machine has, in turn; the one in use before comes back."""
    before = kernels.level()
    kernels.select_level(request.param)
    yield request.param
    kernels.select_level(before)


@pytest.fixture(autouse=True, scope="session")
def _jobs_share_nurseries() -> Iterator[None]:
    """The tests of one process import torch once for all jobs that they run in it."""
    with sharing():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Without the test's name in the environment, which would be another one for every job."""
    name = os.environ.pop("PYTEST_CURRENT_TEST", "")
    try:
        return (yield)
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = name
