"""Fixtures that every package's tests share."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cpu_kernels.kernel_cache import CACHE_VARIABLE

# The same examples in every run, however slow the machine; `pytest --hypothesis-profile=default` draws new ones.
settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("steady")

# What a user has set for this or other programs of its kind, or for terminals, and proxies that stand before our own
# servers. Variables that tests are told by stay.
TOLD_BY = {CACHE_VARIABLE, "LOCALLLM_ISA", "TEST_LLAMA_SERVER", "TEST_DATA"}
TOLD_BY |= {"LOCALLLM_RANDOM_SEED", "LOCALLLM_RANDOM_STEPS"}
OTHERS = ("LOCALLLM_", "OLLAMA_", "HF_", "HUGGINGFACE_", "LLAMA_", "OPENAI_", "ANTHROPIC_", "XDG_")
TERMINALS = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
for _name in set(os.environ) - TOLD_BY:
    if _name.startswith(OTHERS) or _name in TERMINALS or _name.lower().endswith("_proxy"):
        del os.environ[_name]

# No test calls a host that has a certificate. Each HTTP client would read all authorities, which takes 30 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull

# What starts in the background of a shell ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_ID = 100


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests are collected, nor ever again in what that has made: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name long texts by their beginning and length: names go to every process and into every report."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_ID:
        return f"{val[:40]!r} and so on, {len(val)}".encode("unicode_escape").decode()
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that no process is left alone with them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(request: pytest.FixtureRequest) -> None:
    """Keep compiled kernels out of the user's cache, in one folder for all tests and all that they start.

    It is kept between runs; what lies in it is named after the sources, so it is never stale.
    """
    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    if CACHE_VARIABLE not in os.environ and cache is not None:
        os.environ[CACHE_VARIABLE] = str(cache.mkdir("kernels"))


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nobody's settings, models, chats and cached keys and values but those of the tests of this process."""
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real tiny models, vocabularies, templates and texts (TEST_DATA); skips where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("TEST_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set TEST_DATA")
    return path
