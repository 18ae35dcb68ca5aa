"""Fixtures shared by the tests of all packages."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cpu_kernels.kernel_cache import CACHE_VARIABLE
from tests.forking import APPLICATION, Nursery, nursery

# The same examples in every run, and no time limit per example; `--hypothesis-profile=default` draws new ones.
settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("steady")

# Variables of the user's for this or similar programs, for terminals, and for proxies. Those that configure the tests
# are kept.
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

# Background jobs of a shell ignore Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests write the same bytes on every system.
if sys.platform == "win32":
    Path.write_text = partialmethod(Path.write_text, newline="\n")  # type: ignore[assignment, method-assign]

LONGEST_ID = 100


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection during test collection, and exempt the collected objects from it for good."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled kernels out of the user's cache, in one folder for all tests and the processes they start.

    The folder is kept between runs; its entries are named by a hash of the sources, so they are never stale.
    """
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if CACHE_VARIABLE not in os.environ and cache is not None:
        os.environ[CACHE_VARIABLE] = str(cache.mkdir("kernels"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels where all tests are to run, before other processes begin with them."""
    config = session.config
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    if not chosen and not config.option.collectonly and not hasattr(config, "workerinput"):
        from tests.kernels import compile_kernels  # imports much

        config.get_terminal_writer().line("Compiling the kernels that are not in the cache ...")
        compile_kernels()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten long texts in test ids to beginning and length: ids are sent to every process and report."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_ID:
        return f"{val[:40]!r} and so on, {len(val)}".encode("unicode_escape").decode()
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no process is left with them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Isolate this test process from the user's settings, models, chats and KV cache."""
    home = str(tmp_path_factory.mktemp("home"))
    for name in ("HOME", "USERPROFILE", "WIN_PD_OVERRIDE_LOCAL_APPDATA"):  # the last two are for Windows
        os.environ[name] = home


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Start processes of the application whose imports are mostly done."""
    with nursery(APPLICATION, tmp_path_factory.mktemp("children")) as opened:
        yield opened


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real tiny models, vocabularies, templates and texts (TEST_DATA); skips if it is not set."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("TEST_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set TEST_DATA")
    return path
