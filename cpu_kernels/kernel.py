"""Compiled entry points: how they are declared, compiled on first use, and cached on disk.

Every kernel has one signature, kernel(op, step, thread, threads): two addresses of records of 64-bit integers (see
cpu_kernels.records) and who is calling. A program is then a table of addresses, and Python's cost is one call a step.
Kernels hold no Python object and never raise; all bounds are checked before a step.
"""

import ctypes
import hashlib
import itertools
import logging
import os
import pickle
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numba.core.config
import platformdirs
from llvmlite import binding
from numba.core import types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

from cpu_kernels.isa import ISA, target_features

CACHE_VARIABLE = "LOCALLLM_KERNEL_CACHE"
_KEPT_SECONDS = 30 * 24 * 3600
_ADDRESS = types.intp
_SIGNATURE = ((_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS), types.void)
_PROTOTYPE = ctypes.CFUNCTYPE(None, *([ctypes.c_int64] * 4))
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": False}
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_log = logging.getLogger("localllm.kernels")

# Numba counts the functions of a process and names symbols by the count. A process loads from the cache what several
# have compiled, and a symbol that two named alike would send calls astray: so each begins at a place of its own.
FunctionIdentity._unique_ids = itertools.count(secrets.randbits(60))


def inner(function: FunctionT) -> FunctionT:
    """Decorator of functions that only other compiled functions call. Give them a single return: see below.

    LLVM 22 turns a function with two returns and a shift in one branch into a trap when it is inlined into a loop.
    """
    return cast(FunctionT, numba.njit(**_OPTIONS, nogil=True)(function))


def _fingerprint() -> str:
    """Hash of everything compiled code depends on: our sources, the compiler's version and the processor's features."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    digest.update(f"{numba.__version__} {binding.llvm_version_info} {ISA}".encode())
    digest.update(binding.get_host_cpu_name().encode())
    digest.update(" ".join(sorted(target_features())).encode())
    return digest.hexdigest()[:24]


def cache_directory() -> Path:
    """Folder of this user's compiled kernels for this processor and this version of the sources."""
    root = os.environ.get(CACHE_VARIABLE)
    base = Path(root) if root else Path(platformdirs.user_cache_dir("localllm")) / "kernels"
    return base / _fingerprint()


def _remove_unused(used: Path) -> None:
    """Remove the kernels of other versions and processors that no process has used for a month."""
    oldest = time.time() - _KEPT_SECONDS
    for other in used.parent.iterdir():
        if other != used and other.is_dir() and other.stat().st_mtime < oldest:
            shutil.rmtree(other, ignore_errors=True)


def _usable_cache() -> Path | None:
    """Create the cache folder for this user alone; None where it cannot be used (then kernels compile every time)."""
    path = cache_directory()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The cache is pickle: a folder that others can write would run their code.
        if os.name == "posix" and (path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022):
            _log.warning("kernel cache %s is writable by others; compiling without it", path)
            return None
        tempfile.TemporaryFile(dir=path).close()
        os.utime(path)
        _remove_unused(path)
    except OSError as error:
        _log.warning("kernel cache %s cannot be used (%s); kernels are compiled at every start", path, error.strerror)
        return None
    return path


class _NamedCache(FunctionCache):
    """Numba's cache keyed by the kernel's name.

    Its own key pickles what a function closes over, which for compiled functions differs in every process. The folder's
    name already stands for all our sources, so that a name is enough.
    """

    def __init__(self, function: Callable[..., None], name: str) -> None:
        super().__init__(function)
        self._kernel_name = name

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (sig, codegen.magic_tuple(), self._kernel_name)


class Kernel:
    """A function with the kernel signature, compiled when its address is first asked for.

    name must be unique among all kernels: it is the key in the cache.
    """

    def __init__(self, function: Callable[[int, int, int, int], None], name: str) -> None:
        self.name = name
        self._function = function
        self._compiled: Any = None
        self._entry: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether the kernel has an address already."""
        return self._compiled is not None

    def compile(self) -> None:
        """Compile, or load from the cache (seconds at worst), unless that is done."""
        if self._compiled is None:
            self._compiled = _compile(self._function, self.name)

    @property
    def address(self) -> int:
        """Address of the compiled code; compiles on first use."""
        self.compile()
        return int(self._compiled.address)

    def __call__(self, op: int, step: int, thread: int, threads: int) -> None:
        """Run on this thread, without the interpreter's lock."""
        if self._entry is None:
            self._entry = _PROTOTYPE(self.address)
        self._entry(op, step, thread, threads)


def kernel(function: Callable[[int, int, int, int], None]) -> Kernel:
    """Declare a module's function as a kernel."""
    return Kernel(function, f"{function.__module__.removeprefix('cpu_kernels.')}.{function.__name__}")


_cache: Path | None = None
_cache_checked = False


def _compile(function: Callable[..., None], name: str) -> CFunc:
    global _cache, _cache_checked  # noqa: PLW0603 - one process, one cache, looked at once
    if not _cache_checked:
        _cache, _cache_checked = _usable_cache(), True
    if _cache is not None:
        numba.core.config.CACHE_DIR = str(_cache)
        compiled: Any = CFunc(function, _SIGNATURE, locals={}, options=_OPTIONS)
        compiled._cache = _NamedCache(function, name)
        try:
            compiled.compile()
        except (OSError, EOFError, pickle.UnpicklingError, ValueError, AttributeError, RuntimeError) as error:
            _log.warning("kernel cache %s is damaged (%s); it is removed and compiled anew", _cache, error)
            shutil.rmtree(_cache, ignore_errors=True)
            _cache = None
        else:
            return compiled
    compiled = CFunc(function, _SIGNATURE, locals={}, options=_OPTIONS)
    compiled.compile()
    return compiled
