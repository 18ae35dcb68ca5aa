"""Fixtures that every package's tests share."""

import os
import signal
from pathlib import Path

import pytest

from cpu_kernels.kernel_cache import CACHE_VARIABLE

# What starts in the background of a shell ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(request: pytest.FixtureRequest) -> None:
    """Keep compiled kernels out of the user's cache, in one folder for all tests and all that they start.

    It is kept between runs; what lies in it is named after the sources, so it is never stale.
    """
    if CACHE_VARIABLE not in os.environ and request.config.cache is not None:
        os.environ[CACHE_VARIABLE] = str(request.config.cache.mkdir("kernels"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real tiny models, vocabularies, templates and texts (LOCALLLM_TEST_DATA); skips where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("LOCALLLM_TEST_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set LOCALLLM_TEST_DATA")
    return path
