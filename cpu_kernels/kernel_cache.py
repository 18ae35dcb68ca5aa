"""Compiled kernels on disk: where they lie, who is trusted, and how what befell a file is noticed.

A kernel is a file: SHA-256 of what follows, and an object file. Its folder is named by everything that its code depends
on, so that nothing in it can be out of date.
"""

import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from llvmlite import binding

from cpu_kernels.isa import ISA, target_features

CACHE_VARIABLE = "LOCALLLM_KERNEL_CACHE"
SUFFIX = ".kernel"
_KEPT_SECONDS = 30 * 24 * 3600
_DIGEST_BYTES = 32
log = logging.getLogger("localllm.kernels")


def _fingerprint() -> str:
    """Hash of everything compiled code depends on: our sources, the compiler's version and the processor's features."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    compiler = find_spec("numba")
    assert compiler is not None and compiler.origin is not None
    digest.update(Path(compiler.origin).with_name("_version.py").read_bytes())
    digest.update(f"{binding.llvm_version_info} {ISA}".encode())
    digest.update(binding.get_host_cpu_name().encode())
    digest.update(" ".join(sorted(target_features())).encode())
    return digest.hexdigest()[:24]


def cache_root() -> Path:
    """Folder of all of this user's compiled kernels, a folder in it for each processor and version of the sources."""
    root = os.environ.get(CACHE_VARIABLE)
    return Path(root) if root else Path(platformdirs.user_cache_dir("localllm")) / "kernels"


def cache_directory() -> Path:
    """Folder of this user's compiled kernels for this processor and this version of the sources."""
    return cache_root() / _fingerprint()


def _remove_unused(used: Path) -> None:
    """Remove the kernels of other versions and processors that no process has used for a month."""
    oldest = time.time() - _KEPT_SECONDS
    for other in used.parent.iterdir():
        if other != used and other.is_dir() and other.stat().st_mtime < oldest:
            shutil.rmtree(other, ignore_errors=True)


@functools.cache
def _usable_folder() -> Path | None:
    """Create the folder for this user alone; None where it cannot be used (then kernels compile every time)."""
    path = cache_directory()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        # What lies here is run: a folder that others can write would run their code.
        if os.name == "posix" and (path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022):
            log.warning("kernel cache %s is writable by others; compiling without it", path)
            return None
        tempfile.TemporaryFile(dir=path).close()
        os.utime(path)
        _remove_unused(path)
    except OSError as error:
        log.warning("kernel cache %s cannot be used (%s); kernels are compiled at every start", path, error.strerror)
        return None
    return path


def read_kernel(name: str) -> bytes | None:
    """A kernel's object file, None where it was never compiled or is damaged."""
    folder = _usable_folder()
    if folder is None:
        return None
    path = folder / (name + SUFFIX)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("kernel %s cannot be read (%s); it is compiled anew", path, error.strerror)
        return None
    code = data[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() != data[:_DIGEST_BYTES]:
        log.warning("kernel %s is damaged; it is compiled anew", path)
        return None
    return code


def write_kernel(name: str, code: bytes) -> None:
    """Keep an object file; another process sees all of it or nothing."""
    folder = _usable_folder()
    if folder is None:
        return
    try:
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            file = Path(unfinished) / name
            file.write_bytes(hashlib.sha256(code).digest() + code)
            file.replace(folder / (name + SUFFIX))
    except OSError as error:
        log.warning("kernel %s cannot be kept in %s (%s); it is compiled again", name, folder, error.strerror)
