"""The on-disk cache of compiled kernels: its location, ownership checks, and detection of damage.

A kernel is a file: SHA-256 of its place and of the rest, and an object file. Its folder is named by a hash of all that
the code depends on, so its content is never out of date; `portable` kernels replace ones that crash or give wrong
results on this processor. Measurements of the kernels (cpu_kernels.tuning) are stored beside them, in the same kind of
file.

Folders are used by localllm only: below the user's cache folder, or in localllm's folder inside the one that the
environment variable names. Only recognised files are ever removed.
"""

import contextlib
import functools
import hashlib
import logging
import os
import re
import secrets
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from llvmlite import binding

from cpu_kernels.isa import TARGET
from gguf_io.system import OpenFolder, make_folder

CACHE_VARIABLE = "LOCALLLM_KERNEL_CACHE"
SUFFIX, _MEASURED_SUFFIX = ".kernel", ".measured"
_PORTABLE, _UNFINISHED = ".portable", ".unfinished"
_OWN_FOLDER = "localllm-kernels"
_FOLDER_NAME = re.compile("[0-9a-f]{24}")
_KEPT_SECONDS = 30 * 24 * 3600
_DIGEST_BYTES = 32
_MOST_BYTES = 64 << 20  # of a file; kernels have less than a hundredth of that
log = logging.getLogger("localllm.kernels")


@dataclass(frozen=True)
class CachedKernel:
    """An object file. portable: it replaces a build for this processor that crashed or gave wrong results."""

    code: bytes
    portable: bool = False


@functools.cache
def _fingerprint() -> str:
    """Hash of everything that compiled code depends on: sources, compilers and their options, target."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    for package in ("numba", "llvmlite"):
        compiler = find_spec(package)
        assert compiler is not None and compiler.origin is not None
        digest.update(Path(compiler.origin).with_name("_version.py").read_bytes())
    digest.update(f"{binding.llvm_version_info} {TARGET}".encode())
    options = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("NUMBA_"))
    digest.update("\n".join(options).encode())
    with contextlib.suppress(OSError):
        digest.update(Path(".numba_config.yaml").read_bytes())
    return digest.hexdigest()[:24]


def cache_root() -> Path:
    """Folder of all of this user's compiled kernels, with a subfolder per processor and version of the sources."""
    named = os.environ.get(CACHE_VARIABLE)
    return (
        Path(named) / _OWN_FOLDER
        if named
        else Path(platformdirs.user_cache_dir("localllm", appauthor=False)) / "kernels"
    )


def cache_directory() -> Path:
    """Folder of this user's compiled kernels for this processor and this version of the sources."""
    return cache_root() / _fingerprint()


def portable_kernels() -> list[str]:
    """Names of kernels that had to be built without this processor's special instructions."""
    ending = _PORTABLE + SUFFIX
    return sorted(path.name.removesuffix(ending) for path in cache_directory().glob(f"*{ending}"))


def _remove_unused() -> None:
    """Remove folders of kernels that no process has opened for a month.

    A folder is recognised by its name, if it belongs to this user and holds only cache files; anything else is left
    alone, like what cannot be removed: another process may be removing it too. Files are removed by the names that were
    checked, through the folder that was opened and checked.
    """
    root = cache_root()
    oldest = time.time() - _KEPT_SECONDS
    for name in filter(_FOLDER_NAME.fullmatch, os.listdir(root)):
        with contextlib.suppress(OSError), contextlib.closing(OpenFolder(root / name)) as folder:
            files = folder.names()
            if folder.is_private() and folder.modified() < oldest and all(_is_ours(folder, each) for each in files):
                for each in files:
                    folder.unlink(each)
                os.rmdir(root / name)


def _is_ours(folder: OpenFolder, name: str) -> bool:
    return name.endswith((SUFFIX, _MEASURED_SUFFIX, _UNFINISHED)) and folder.is_regular(name)


@functools.cache
def _usable_folder(path: Path) -> OpenFolder | None:
    """Open the cache, creating it for this user only; None if it is unusable (then kernels compile at every start).

    All access goes through the folder opened and checked here, even if its path changes meaning later.
    """
    try:
        make_folder(path)
        folder = OpenFolder(path)
        # Files here are executed: if others could write to the folder, their code would run.
        if not folder.is_private():
            log.warning("kernel cache %s is writable by others; compiling without it", path)
            folder.close()
            return None
        folder.touch()
        probe = f"{secrets.token_hex(8)}{_UNFINISHED}"
        folder.create(probe, b"")
        folder.unlink(probe)
        _remove_unused()
    except OSError as error:
        log.warning("kernel cache %s cannot be used (%s); kernels are compiled at every start", path, error.strerror)
        return None
    return folder


def read_kernel(name: str) -> CachedKernel | None:
    """A kernel from the cache, None if it is not there or damaged."""
    for middle in ("", _PORTABLE):
        code = _read(name + middle + SUFFIX, "it is compiled again")
        if code is not None:
            return CachedKernel(code, portable=middle == _PORTABLE)
    return None


def write_kernel(name: str, kernel: CachedKernel) -> None:
    """Write a kernel to the cache, atomically for other processes."""
    _write(name + (_PORTABLE if kernel.portable else "") + SUFFIX, kernel.code, "it is compiled again")


def read_measured(name: str) -> bytes | None:
    """The data that write_measured stored under this name, None if there is none or it is damaged."""
    return _read(name + _MEASURED_SUFFIX, "it counts as not measured")


def write_measured(name: str, data: bytes) -> None:
    """Store a measurement of these kernels on this machine."""
    _write(name + _MEASURED_SUFFIX, data, "it has to be measured again")


def _read(file: str, otherwise: str) -> bytes | None:
    """A file's content behind its digest. otherwise: the consequence to log if it cannot be used."""
    folder = _usable_folder(cache_directory())
    if folder is None:
        return None
    try:
        data = folder.read(file, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("kernel cache: %s cannot be read (%s); %s", file, error.strerror, otherwise)
        return None
    content = data[_DIGEST_BYTES:]
    if _digest(file, content) == data[:_DIGEST_BYTES]:
        return content
    log.warning("kernel cache: %s is damaged; %s", file, otherwise)
    return None


def _digest(file: str, content: bytes) -> bytes:
    """A digest that also changes with the file's name and version: a whole file in a wrong place is damaged."""
    return hashlib.sha256(f"{_fingerprint()}/{file}\0".encode() + content).digest()


def _write(file: str, content: bytes, otherwise: str) -> None:
    folder = _usable_folder(cache_directory())
    if folder is None:
        return
    unfinished = f"{secrets.token_hex(8)}{_UNFINISHED}"
    try:
        folder.create(unfinished, _digest(file, content) + content)
        folder.replace(unfinished, file)
    except OSError as error:
        log.warning("kernel cache: %s cannot be kept (%s); %s", file, error.strerror, otherwise)
        with contextlib.suppress(OSError):
            folder.unlink(unfinished)
