"""Compiled kernels on disk: where they are, who is trusted, and how damage is noticed.

A kernel is a file: SHA-256 of what follows, and an object file. Its folder is named by everything that its code depends
on, so that nothing in it can be out of date; `portable` ones replace kernels that this processor computes wrong. Beside
them is what was measured of them (cpu_kernels.tuning), in a file of the same kind.

The folders are ours alone: below the user's cache folder, or in one of our own inside the folder that a variable names.
Only what is recognised there is ever removed.
"""

import contextlib
import functools
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from llvmlite import binding

from cpu_kernels.isa import TARGET

CACHE_VARIABLE = "LOCALLLM_KERNEL_CACHE"
SUFFIX, _MEASURED_SUFFIX = ".kernel", ".measured"
_PORTABLE, _UNFINISHED = ".portable", ".unfinished"
_OWN_FOLDER = "localllm-kernels"
_FOLDER_NAME = re.compile("[0-9a-f]{24}")
_KEPT_SECONDS = 30 * 24 * 3600
_DIGEST_BYTES = 32
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
log = logging.getLogger("localllm.kernels")


@dataclass(frozen=True)
class CachedKernel:
    """An object file. portable: it replaces a build for this processor that computed something else than its source."""

    code: bytes
    portable: bool = False


@functools.cache
def _fingerprint() -> str:
    """Hash of everything that compiled code depends on: our sources, the compilers and their options, the target."""
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
    """Folder of all of this user's compiled kernels, a folder in it for each processor and version of the sources."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) / _OWN_FOLDER if named else Path(platformdirs.user_cache_dir("localllm")) / "kernels"


def cache_directory() -> Path:
    """Folder of this user's compiled kernels for this processor and this version of the sources."""
    return cache_root() / _fingerprint()


def portable_kernels() -> list[str]:
    """Names of kernels in use that had to be built without what this processor has beyond a plain one."""
    ending = _PORTABLE + SUFFIX
    return sorted(path.name.removesuffix(ending) for path in cache_directory().glob(f"*{ending}"))


def _remove_unused() -> None:
    """Remove folders of kernels that no process has begun to use for a month.

    A folder is one of ours if it has such a name, belongs to this user and holds kernels alone; anything else is left
    as it is. Files are removed by the names that were looked at, in the folder that was looked at.
    """
    root = cache_root()
    oldest = time.time() - _KEPT_SECONDS
    for name in filter(_FOLDER_NAME.fullmatch, os.listdir(root)):
        try:
            folder = os.open(root / name, _OPEN_FOLDER)
        except OSError:
            continue
        try:
            found, files = os.fstat(folder), os.listdir(folder)
            unused = found.st_uid == os.getuid() and found.st_mtime < oldest
            if unused and all(_is_ours(folder, each) for each in files):
                for each in files:
                    os.unlink(each, dir_fd=folder)
                os.rmdir(root / name)
        finally:
            os.close(folder)


def _is_ours(folder: int, name: str) -> bool:
    return name.endswith((SUFFIX, _MEASURED_SUFFIX, _UNFINISHED)) and stat.S_ISREG(
        os.lstat(name, dir_fd=folder).st_mode
    )


@functools.cache
def _usable_folder() -> int | None:
    """Open the folder, made for this user alone; None where it cannot be used (then kernels compile every time).

    All access goes through what was opened and checked here, whatever its path leads to afterwards.
    """
    path = cache_directory()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(path, _OPEN_FOLDER)
        found = os.fstat(folder)
        # What lies here is run: a folder that others can write would run their code.
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            log.warning("kernel cache %s is writable by others; compiling without it", path)
            os.close(folder)
            return None
        os.utime(folder)
        probe = f"{secrets.token_hex(8)}{_UNFINISHED}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder))
        os.unlink(probe, dir_fd=folder)
        _remove_unused()
    except OSError as error:
        log.warning("kernel cache %s cannot be used (%s); kernels are compiled at every start", path, error.strerror)
        return None
    return folder


def read_kernel(name: str) -> CachedKernel | None:
    """A kernel from the cache, None where it was never compiled or is damaged."""
    for middle in ("", _PORTABLE):
        code = _read(name + middle + SUFFIX, "it is compiled anew")
        if code is not None:
            return CachedKernel(code, portable=middle == _PORTABLE)
    return None


def write_kernel(name: str, kernel: CachedKernel) -> None:
    """Keep a kernel; another process sees all of it or nothing."""
    _write(name + (_PORTABLE if kernel.portable else "") + SUFFIX, kernel.code, "it is compiled again")


def read_measured(name: str) -> bytes | None:
    """What write_measured has kept under this name, None where there is nothing or it is damaged."""
    return _read(name + _MEASURED_SUFFIX, "it counts as not measured")


def write_measured(name: str, data: bytes) -> None:
    """Keep what was measured of these kernels on this machine."""
    _write(name + _MEASURED_SUFFIX, data, "it has to be measured again")


def _read(file: str, otherwise: str) -> bytes | None:
    """A file's content behind its digest; otherwise: what follows where it cannot be used."""
    folder = _usable_folder()
    if folder is None:
        return None
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as opened:
            data = opened.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("kernel cache: %s cannot be read (%s); %s", file, error.strerror, otherwise)
        return None
    content = data[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() == data[:_DIGEST_BYTES]:
        return content
    log.warning("kernel cache: %s is damaged; %s", file, otherwise)
    return None


def _write(file: str, content: bytes, otherwise: str) -> None:
    folder = _usable_folder()
    if folder is None:
        return
    unfinished = f"{secrets.token_hex(8)}{_UNFINISHED}"
    try:
        created = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        with os.fdopen(created, "wb") as opened:
            opened.write(hashlib.sha256(content).digest() + content)
        os.replace(unfinished, file, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        log.warning("kernel cache: %s cannot be kept (%s); %s", file, error.strerror, otherwise)
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
