"""Installs the build of llama-cpp-python that this machine's GPU needs, after trying it.

The wheel is unpacked into a folder of its own and tried there in a child process, so the environment changes only when
it is known to work. Then pip replaces the old one. If that fails, the environment's files are put back as they were.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib.metadata import Distribution, PackageNotFoundError, distributions
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import httpx2
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from gguf_io.system import run_within
from gpu_offload.builds import INDEXES, SHA256, VERSION, Build, FoundGpu, compile_command
from localllm.errors import RequestError
from localllm.files import TEMPORARY, listed, stale
from localllm.library.errors import PullError
from localllm.library.web import PassingError, Remote, check_status, decimal, get, new_client

PACKAGE = "llama-cpp-python"
_INDEX_BYTES = 16 << 20
_PIECE = 1 << 20
_TRY_S = 600  # the first time, kernels of the CPU engine are compiled
_TRY = """
import sys
sys.path[:] = sys.argv[1:]
from localllm.gpu_trial import main
main()
"""

Progress = Callable[[str, float], object]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel in an index. sha256: what it must be, None if only the index vouches for it."""

    file: str
    url: str
    sha256: str | None


def install(
    build: Build, gpus: list[FoundGpu], progress: Progress, index: str | None = None, sha256: str | None = None
) -> str:
    """Install a build into this environment; return what the trial found, for the user.

    index: the address of an index of the user's own. sha256: the wheel's, in place of the one that is known here.
    progress receives an activity and its completed fraction. Raises RequestError, with the environment unchanged.
    """
    if index and not index.startswith(("http://", "https://")):
        raise RequestError(f"gpu_index: {index!r} is not an address that begins with http:// or https://.")
    site = own_folder()
    old = _replaceable(site)
    with _unchanged_on_a_full_disk(site), _work_folder(site) as folder, new_client() as client:
        wheel = find_wheel(client, build, gpus, index, sha256)
        path = folder / wheel.file
        _download(client, wheel, path, progress)
        check_space(path, site)
        progress("trying it", 0.0)
        tried = folder / "tried"
        _pip("install", "--target", str(tried), str(path))
        found = trial(tried, build)
        progress("installing it", 0.0)
        with _restored_on_failure(site, old, _files(tried), folder):
            _pip("install", "--force-reinstall", str(path))
            _check_installed(site)
    return found


def find_wheel(
    client: httpx2.Client, build: Build, gpus: list[FoundGpu], index: str | None, sha256: str | None
) -> Wheel:
    """The wheel of a build for this Python. Raises RequestError, with the command that compiles it if there is none."""
    base = f"{index.rstrip('/')}" if index else f"{INDEXES}/{build.name}"
    page = f"{base}/{PACKAGE}/"
    tags = {tag: rank for rank, tag in enumerate(sys_tags())}
    best: tuple[int, str] | None = None
    for link in _links(client, page):
        name = unquote(urlsplit(link).path.rpartition("/")[2])
        try:
            package, version, _, supported = parse_wheel_filename(name)
        except InvalidWheelFilename:
            continue
        rank = min((tags[tag] for tag in supported if tag in tags), default=None)
        if package == PACKAGE and version.public == VERSION and rank is not None and (best is None or rank < best[0]):
            best = rank, link
    if best is None:
        raise RequestError(
            f"{base} has no wheel of {PACKAGE} {VERSION} for this Python and system. Compile it, which needs CMake, a "
            f"C++ compiler and the development files for {build.kind}: {compile_command(build.kind, gpus)}"
        )
    address, _, fragment = best[1].partition("#")
    file = unquote(urlsplit(address).path.rpartition("/")[2])
    stated = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
    known = (sha256 or "").lower() or (stated if index else SHA256.get((build.name, file)))
    if known is None and not index:
        raise RequestError(
            f"This version of localllm does not know the SHA-256 of {file} ({build.name}). Give it, as "
            f"{build.hash_page()} shows it: localllm gpu install --sha256 HASH. Or compile: "
            f"{compile_command(build.kind, gpus)}"
        )
    return Wheel(file, address, known)


class _Anchors(HTMLParser):
    """The addresses of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _links(client: httpx2.Client, page: str) -> list[str]:
    with _network_errors(), get(client, Remote(page), {}) as response:
        check_status(response, "an index of llama-cpp-python")
        data = bytearray()
        for piece in response.iter_raw():
            data += piece
            if len(data) > _INDEX_BYTES:
                raise RequestError(f"{page} is longer than an index can be.")
        anchors = _Anchors()
        anchors.feed(data.decode("utf-8", "replace"))
        found = []
        for link in anchors.found:
            with suppress(ValueError):  # a malformed link leads to no wheel
                found.append(urljoin(str(response.url), link))
        return found


def _download(client: httpx2.Client, wheel: Wheel, path: Path, progress: Progress) -> None:
    """Fetch a wheel and compare its hash."""
    digest, done = hashlib.sha256(), 0
    with _network_errors(), get(client, Remote(wheel.url), {}) as response, path.open("xb") as file:
        check_status(response, wheel.file)
        length = decimal(response.headers.get("content-length", ""))
        for piece in response.iter_raw(_PIECE):
            file.write(piece)
            digest.update(piece)
            done += len(piece)
            progress(f"downloading {wheel.file}", min(done / length, 1.0) if length else 0.0)
    if wheel.sha256 not in (None, digest.hexdigest()):
        raise RequestError(
            f"{wheel.file} has the SHA-256 {digest.hexdigest()}, not {wheel.sha256}: it is damaged, or not the file "
            "that was asked for. Nothing was changed."
        )


@contextmanager
def _network_errors() -> Iterator[None]:
    try:
        yield
    except PassingError as error:
        told = str(error).rstrip(".")
        raise RequestError(f"{told}. Nothing was changed; run `localllm gpu install` again with a network.") from error
    except PullError as error:
        raise RequestError(f"{error} Nothing was changed.") from error


def own_folder() -> Path:
    """Where pip installs packages of this environment. Raises RequestError if it cannot, or must not."""
    site = Path(sysconfig.get_path("platlib"))
    if find_spec("pip") is None:
        raise RequestError(
            f"The environment of {sys.executable} has no pip, which `localllm gpu install` needs. Add it with "
            f'"{sys.executable}" -m ensurepip, or with the program that made the environment.'
        )
    if os.environ.get("LLAMA_CPP_LIB_PATH"):
        raise RequestError("LLAMA_CPP_LIB_PATH names another llama.cpp, which would still be used. Unset it first.")
    if os.path.exists(Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED") and sys.prefix == sys.base_prefix:
        raise RequestError("The system manages this Python's packages. Install localllm into a virtual environment.")
    if not os.access(site, os.W_OK | os.X_OK):
        raise RequestError(f"{site} cannot be written. Run this as the user who installed localllm.")
    return site


def _replaceable(site: Path) -> Distribution | None:
    """The llama-cpp-python in a folder of packages, None if there is none.

    Raises RequestError for one that pip does not manage. One of another folder on the path stays where it is.
    """
    with suppress(PackageNotFoundError):
        for found in distributions(name=PACKAGE, path=[str(site)]):
            installer = (found.read_text("INSTALLER") or "").strip()
            if installer != "pip" or found.files is None or _is_editable(found):
                by = installer if installer and installer != "pip" else "something other than pip"
                raise RequestError(
                    f"{PACKAGE} {found.version} in {site} was installed by {by}, which must remove it before "
                    "`localllm gpu install` can install another."
                )
            return found
    return None


def _is_editable(found: Distribution) -> bool:
    try:
        origin = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return bool(origin.get("dir_info", {}).get("editable"))


@contextmanager
def _work_folder(site: Path) -> Iterator[Path]:
    """A temporary folder beside the packages: on the disk that must have room, and where files can be linked."""
    for leftover in listed(site):
        if leftover.name.startswith(f"{TEMPORARY}gpu-") and os.path.isdir(leftover) and stale(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}gpu-", dir=site))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _unchanged_on_a_full_disk(site: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RequestError(
            f"The disk of {site} is full. Nothing was changed; free some space and try again."
        ) from error


def check_space(path: Path, site: Path) -> None:
    """Raise RequestError unless a wheel's files fit twice: to be tried, and to be installed."""
    try:
        with zipfile.ZipFile(path) as wheel:
            size = sum(one.file_size for one in wheel.infolist())
    except zipfile.BadZipFile as error:
        raise RequestError(f"{path.name} is not a wheel: {error}. Nothing was changed.") from error
    free = shutil.disk_usage(site).free
    if 2 * size > free:
        raise RequestError(
            f"The disk of {site} has {free / 2**30:.1f} GiB free, and installing {path.name} takes "
            f"{2 * size / 2**30:.1f}. Nothing was changed; free some space and try again."
        )


def _pip(command: str, *arguments: str) -> None:
    """Run this environment's pip without the network and the user's configuration. Raises RequestError."""
    flags = ["--isolated", "--no-index", "--no-deps", "--no-compile", "--no-input", "--disable-pip-version-check", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *flags, "--root-user-action=ignore", *arguments],
        check=False,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment | {"PIP_CONFIG_FILE": os.devnull},
    )
    if done.returncode:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise RequestError(
            f"pip cannot install the wheel: {' '.join(said) or done.stderr.strip()[-500:]}. Nothing was changed."
        )


def trial(folder: Path, build: Build) -> str:
    """Let a child process compute with the wheel in a folder. Returns what it found; raises RequestError."""
    needs = f" It needs {build.needs}." if build.needs else ""
    kept = "It was not installed, and what was there before is unchanged."
    command = [sys.executable, "-I", "-c", _TRY, str(folder), *sys.path]
    try:
        done = run_within(_TRY_S, command)
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"The build {build.name} gave no answer in {_TRY_S} seconds. {kept}") from error
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.decode(errors="replace").strip() or "no message").splitlines()[-1]
        how = f"ended with signal {-done.returncode}" if done.returncode < 0 else f"failed ({last})"
        raise RequestError(f"The build {build.name} {how} when it was tried.{needs} {kept}") from None
    if "error" in found:
        raise RequestError(f"The build {build.name} does not run here: {found['error']}.{needs} {kept}")
    devices = [name for name, kind in found["devices"] if kind == build.kind]
    if not devices and build.kind != "CPU":
        raise RequestError(f"The build {build.name} finds no {build.kind} device.{needs} {kept}")
    if found["wrong"]:
        raise RequestError(
            f"The build {build.name} computes {found['wrong']} of {found['rows']} tokens of the built-in model "
            f"differently from the CPU engine. {kept}"
        )
    where = ", ".join(devices) or "the processor"
    return f"On {where}, {found['rows']} tokens of the built-in model are those of the CPU engine"


def _files(folder: Path) -> set[str]:
    """The files that a wheel installs, relative to the folder of packages."""
    found = next(iter(distributions(name=PACKAGE, path=[str(folder)])), None)
    return {str(file) for file in (found.files or ())} if found else set()


@contextmanager
def _restored_on_failure(site: Path, old: Distribution | None, new: set[str], folder: Path) -> Iterator[None]:
    """Put the environment's files back if the block fails. new: what it installs. folder: for copies, mostly links."""
    listed_files = [*map(str, (old.files or []) if old else []), *new]
    paths = {os.path.normpath(os.path.join(site, file)) for file in listed_files}
    paths |= {cache_from_source(path) for path in paths if path.endswith(".py")}  # removed with the old one
    kept = {path: folder / f"kept-{number}" for number, path in enumerate(sorted(paths)) if os.path.isfile(path)}
    for path, copy in kept.items():
        _link(path, copy)
    folders = {str(Path(path).parent) for path in kept}
    try:
        yield
    except BaseException:
        for file in new:
            made = Path(os.path.normpath(os.path.join(site, file)))
            if str(made) not in kept and site in made.parents:
                made.unlink(missing_ok=True)
                _remove_empty(made.parent, site, folders)
        for path, copy in kept.items():
            if not os.path.isfile(path) or not os.path.samefile(path, copy):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _link(str(copy), Path(path))
        raise


def _link(source: str, target: Path) -> None:
    """Make a target a second name of a file, or a copy where that is impossible. Replaces an existing target."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _remove_empty(folder: Path, site: Path, needed: set[str]) -> None:
    """Remove a folder of packages and those above it that are empty now."""
    with suppress(OSError):
        while folder != site and site in folder.parents and str(folder) not in needed:
            folder.rmdir()
            folder = folder.parent


def _check_installed(site: Path) -> None:
    found = next(iter(distributions(name=PACKAGE, path=[str(site)])), None)
    if found is None or found.version.partition("+")[0] != VERSION:
        raise RequestError(f"pip reports success, but {PACKAGE} {VERSION} is not in {site}. Nothing was changed.")
