"""What all tests share: the SIMD levels of this machine, and the marker of tests with torch."""

from collections.abc import Iterator

import pytest

from planaria import kernels


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "torch: imports PyTorch; left out under the sanitizers")


@pytest.fixture(params=kernels.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each SIMD level that this machine has, in turn; the one in use before comes back."""
    before = kernels.level()
    kernels.select_level(request.param)
    yield request.param
    kernels.select_level(before)
