"""One folder of compiled kernels for all tests of kernels, kept between runs."""

import os

import pytest

from cpu_kernels.kernel import CACHE_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(request: pytest.FixtureRequest) -> None:
    """Keep compiled kernels out of the user's cache; its folder is named after the sources, so it is never stale."""
    if CACHE_VARIABLE not in os.environ and request.config.cache is not None:
        os.environ[CACHE_VARIABLE] = str(request.config.cache.mkdir("kernels"))
