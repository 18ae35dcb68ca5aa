"""The on-disk cache of compiled kernels: its location, ownership checks, and detection of damage.

A kernel is a file: SHA-256 of its place and of the rest, and an object file. Its folder is named by a hash of all that
the code of its module's kernels depends on, so its content is never out of date, and an edit of a module leaves the
kernels of modules that do not import it; `portable` kernels replace ones that crash or give wrong results on this
processor. Measurements of the kernels (cpu_kernels.tuning) are in the same kind of file, in a folder named by a hash of
all modules.

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
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from llvmlite import binding

from cpu_kernels.isa import TARGET
from gguf_io.system import OpenFolder, is_private, make_folder

CACHE_VARIABLE = "LOCALLLM_KERNEL_CACHE"
SUFFIX, _MEASURED_SUFFIX = ".kernel", ".measured"
_PORTABLE, _UNFINISHED = ".portable", ".unfinished"
_OWN_FOLDER = "localllm-kernels"
_COMPILER = "cpu_kernels.compile_child"
_IMPORT = re.compile(r"from (cpu_kernels[.\w]*) import (\([^)]*\)|.*)")
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
def _sources() -> dict[str, tuple[bytes, set[str]]]:
    """The modules of cpu_kernels by name: a hash of the source, and the modules among them that it imports."""
    folder = Path(__file__).parent
    found = {}
    for path in folder.rglob("*.py"):
        name = ".".join(("cpu_kernels", *path.relative_to(folder).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path.read_bytes()
    return {
        name: (hashlib.sha256(source).digest(), _imported(name, source) & found.keys())
        for name, source in found.items()
    }


def _imported(module: str, source: bytes) -> set[str]:
    """What a module may import: its package, and what import statements name."""
    names = {module.rpartition(".")[0]}
    for package, members in _IMPORT.findall(source.decode()):
        names.add(package)
        for member in re.findall(r"\w+", members):
            names.add(f"{package}.{member}")
    return names


@functools.cache
def _compilers() -> bytes:
    """Hash of what all compiled code depends on beside the sources: compilers, their options, target."""
    digest = hashlib.sha256()
    for package in ("numba", "llvmlite"):
        compiler = find_spec(package)
        assert compiler is not None and compiler.origin is not None
        digest.update(Path(compiler.origin).with_name("_version.py").read_bytes())
    digest.update(f"{sys.implementation.cache_tag} {binding.llvm_version_info} {TARGET}".encode())
    for name in sorted(os.environ):
        if name.startswith("NUMBA_"):
            digest.update(f"{name}={os.environ[name]}\n".encode())
    with contextlib.suppress(OSError):
        digest.update(Path(".numba_config.yaml").read_bytes())
    return digest.digest()


@functools.cache
def _fingerprint(module: str) -> str:
    """Hash of everything that the code of a module's kernels depends on.

    Its sources are those that it and the compiler import, at any remove; all for a module outside cpu_kernels, or "".
    """
    sources, needed = _sources(), set[str]()
    waiting = [module, _COMPILER] if module in sources else [*sources]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += sources[name][1]
    digest = hashlib.sha256(_compilers())
    for name in sorted(needed):
        digest.update(name.encode() + sources[name][0])
    return digest.hexdigest()[:24]


def cache_root() -> Path:
    """Folder of all of this user's compiled kernels, with subfolders by processor and version of the sources."""
    named = os.environ.get(CACHE_VARIABLE)
    return (
        Path(named) / _OWN_FOLDER
        if named
        else Path(platformdirs.user_cache_dir("localllm", appauthor=False)) / "kernels"
    )


def cache_directory(module: str = "") -> Path:
    """Folder of a module's compiled kernels for this processor and version; without one, of what depends on all."""
    return cache_root() / _fingerprint(module)


def cache_directories() -> list[Path]:
    """The folders of all kernels for this processor and version, whether they exist or not."""
    return sorted({cache_directory(module) for module in ("", *_sources())})


def portable_kernels() -> list[str]:
    """Names of kernels that had to be built without this processor's special instructions."""
    ending = _PORTABLE + SUFFIX
    found = (path for folder in cache_directories() for path in folder.glob(f"*{ending}"))
    return sorted(path.name.removesuffix(ending) for path in found)


@functools.cache
def _remove_unused(root: Path) -> None:
    """Remove folders of kernels that no process has used for a month, once in a process that writes some.

    A folder is recognised by its name, if it belongs to this user and holds only cache files; anything else is left
    alone, like what cannot be removed: another process may be removing it too. Files are removed by the names that were
    checked, through the folder that was opened and checked.
    """
    oldest = time.time() - _KEPT_SECONDS
    for name in filter(_FOLDER_NAME.fullmatch, os.listdir(root)):
        with contextlib.suppress(OSError), contextlib.closing(OpenFolder(root / name)) as folder:
            files = folder.names()
            if (
                is_private(folder.place)
                and folder.modified() < oldest
                and all(_is_ours(folder, each) for each in files)
            ):
                for each in files:
                    folder.unlink(each)
                os.rmdir(root / name)


def _is_ours(folder: OpenFolder, name: str) -> bool:
    return name.endswith((SUFFIX, _MEASURED_SUFFIX, _UNFINISHED)) and folder.is_regular(name)


@functools.cache
def _warn(text: str) -> None:
    """Log a warning, once for all folders."""
    log.warning(text)


@functools.cache
def _opened(path: Path) -> OpenFolder | None:
    """Open a folder of kernels. None if others can write to it; raises OSError.

    All access goes through the folder opened and checked here, even if its path changes meaning later.
    """
    folder = OpenFolder(path)
    # Files here are executed: if others could write to the folder, their code would run.
    if not is_private(folder.place):
        log.warning("kernel cache %s is writable by others; compiling without it", path)
        folder.close()
        return None
    with contextlib.suppress(OSError):  # what may only be read is not removed either
        folder.touch()
    return folder


def _folder(module: str, *, create: bool = False) -> OpenFolder | None:
    """A module's folder, created for this user only if asked for.

    None if there is none, or if it is unusable: then kernels are compiled at every start.
    """
    path = cache_directory(module)
    try:
        if create:
            make_folder(path)
        return _opened(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"kernel cache {path.parent} cannot be used ({error.strerror}); kernels are compiled at every start")
        return None


def read_kernel(module: str, name: str) -> CachedKernel | None:
    """A module's kernel from the cache, None if it is not there or damaged."""
    for middle in ("", _PORTABLE):
        code = _read(module, name + middle + SUFFIX, "it is compiled again")
        if code is not None:
            return CachedKernel(code, portable=middle == _PORTABLE)
    return None


def write_kernel(module: str, name: str, kernel: CachedKernel) -> None:
    """Write a module's kernel to the cache, atomically for other processes."""
    _write(module, name + (_PORTABLE if kernel.portable else "") + SUFFIX, kernel.code)


def read_measured(name: str) -> bytes | None:
    """The data that write_measured stored under this name, None if there is none or it is damaged."""
    return _read("", name + _MEASURED_SUFFIX, "it counts as not measured")


def write_measured(name: str, data: bytes) -> None:
    """Store a measurement of these kernels on this machine."""
    _write("", name + _MEASURED_SUFFIX, data)


def _read(module: str, file: str, otherwise: str) -> bytes | None:
    """A file's content behind its digest. otherwise: the consequence to log if it cannot be used."""
    folder = _folder(module)
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
    if _digest(module, file, content) == data[:_DIGEST_BYTES]:
        return content
    log.warning("kernel cache: %s is damaged; %s", file, otherwise)
    return None


def _digest(module: str, file: str, content: bytes) -> bytes:
    """A digest that also changes with the file's name and version: a whole file in a wrong place is damaged."""
    return hashlib.sha256(f"{_fingerprint(module)}/{file}\0".encode() + content).digest()


def _write(module: str, file: str, content: bytes) -> None:
    folder = _folder(module, create=True)
    if folder is None:
        return
    unfinished = f"{secrets.token_hex(8)}{_UNFINISHED}"
    try:
        folder.create(unfinished, _digest(module, file, content) + content)
        folder.replace(unfinished, file)
        _remove_unused(cache_root())
    except OSError as error:
        _warn(f"kernel cache {cache_root()}: files cannot be kept ({error.strerror}); kernels are compiled again")
        with contextlib.suppress(OSError):
            folder.unlink(unfinished)
