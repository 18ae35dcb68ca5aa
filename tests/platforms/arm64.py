"""Tests on 64-bit ARM, with Debian for arm64 under qemu: `make test-arm64`, or `arm64.py FOLDER [--formats NAME,...]`.

Needs Debian or Ubuntu, root, and some 1.5 GB in FOLDER. The first call sets the system up in a few minutes: packages of
Debian and this project's wheels, nothing else. Compiling is 20 to 30 times slower than without qemu, so a bounded set
runs there: which features and which instruction set each kind of processor gets, the tests of threads and of kernels
that crash, and products of a few weight formats, whose bits must be those of this machine. Speeds under qemu say
nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ["qemu-user-static", "binfmt-support", "debootstrap"]
RELEASE, PYTHON = "bookworm", "3.11"
# Of wheels that run with this release's C library, 2.36.
PLATFORMS = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37))]
TOOLS = ("pytest", "hypothesis", "jsonschema")
TESTS = ("test_system_facts.py", "test_cores.py", "test_sharing.py", "test_threads.py", "test_compile_children.py")
# qemu writes a line of its own after those of a process that aborts.
LEFT_OUT = "tests/cpu_kernels/test_compile_children.py::test_a_child_that_dies_is_one_error[aborts]"
# What qemu emulates, and the instruction set that it must get.
PROCESSORS = {"cortex-a72": "portable", "cortex-a76": "neon-dot", "max": "neon-dot"}
FASTEST = "cortex-a76"
TEST_SECONDS = 3600
MARK = ".localllm-arm64"  # in folders that this script made
_ISA = "from cpu_kernels.isa import ISA; print(ISA)"
_DIGESTS = """
import hashlib, json, sys
from tests.cpu_kernels import isa_probe
isa_probe.ALL_WIDTHS = ()
found, differing = isa_probe.products(sys.argv[1:])
digests = {name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in found.items()}
json.dump({"digests": digests, "differing": differing}, sys.stdout)
"""


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(*command: object) -> None:
    """Run a command; its output is shown only if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def set_up(folder: Path) -> None:
    """Make a system for arm64 in folder/root, with the project's packages in its folder /site."""
    root = folder / "root"
    run("apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", *PACKAGES)
    if not Path("/proc/sys/fs/binfmt_misc/register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", "/proc/sys/fs/binfmt_misc")
        run("update-binfmts", "--enable", "qemu-aarch64")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise SystemExit(f"{folder} holds other files. Name a folder that does not exist yet.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    run("debootstrap", "--arch=arm64", "--variant=minbase", "--include=python3,gcc,libc6-dev", RELEASE, root)
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = [one for one in described["optional-dependencies"]["dev"] if one.startswith(TOOLS)]
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--target", root / "site", "--only-binary", ":all:"),
        *(f"--platform={platform}" for platform in PLATFORMS),
        *("--python-version", PYTHON, "--implementation", "cp"),
        *("--constraint", ROOT / "constraints.txt", *described["dependencies"], *tools),
    )
    for name in ("checkout", "proc", "dev"):
        (root / name).mkdir(exist_ok=True)
    (folder / "complete").touch()


def python(folder: Path, processor: str, *arguments: str) -> Sequence[str]:
    """The command that runs the system's Python in this checkout on an emulated processor.

    The mounts are in a namespace of their own, so they end with the command. The checkout is read-only there.
    """
    root = folder / "root"
    script = (
        f"mount --bind -o ro {ROOT} {root}/checkout && mount -t proc proc {root}/proc && mount --bind /dev {root}/dev "
        f"&& exec chroot {root} /usr/bin/env -i -C /checkout QEMU_CPU={processor} PATH=/usr/bin:/bin HOME=/root "
        'PYTHONPATH=/checkout:/site PYTHONDONTWRITEBYTECODE=1 python3 "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", script, "sh", *arguments]


def check_instruction_sets(folder: Path) -> None:
    """Each emulated processor gets the instruction set that it has."""
    for processor, expected in PROCESSORS.items():
        done = subprocess.run(python(folder, processor, "-c", _ISA), capture_output=True, text=True, check=True)
        say(f"{processor}: {done.stdout.strip()}")
        if done.stdout.strip() != expected:
            raise SystemExit(f"{processor} must get {expected}")


def check_bits(folder: Path, formats: Sequence[str]) -> None:
    """Products on ARM have this machine's bits."""
    here = subprocess.run(
        [sys.executable, "-c", _DIGESTS, *formats],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    there = subprocess.run(
        python(folder, FASTEST, "-c", _DIGESTS, *formats), capture_output=True, text=True, check=False
    )
    if there.returncode != 0 or "portable" in there.stderr:
        raise SystemExit(f"products on ARM: {there.stderr[-2000:]}")
    if json.loads(there.stdout) != json.loads(here.stdout):
        raise SystemExit(f"products differ: {there.stdout}\nhere: {here.stdout}")
    say(f"products in {', '.join(formats)}: same bits as here")


def main() -> None:
    """Parse the command line, set the system up if it is not there, run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--formats", default="Q8_0,Q4_K,Q6_K")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if sys.platform != "linux" or shutil.which("apt-get") is None or os.geteuid() != 0:
        raise SystemExit("Setting up an ARM64 system needs root on Debian or Ubuntu.")
    if not (folder / "complete").exists():
        say(f"Setting up Debian for arm64 in {folder}, once.")
        set_up(folder)
    check_instruction_sets(folder)
    tests = [f"tests/cpu_kernels/{name}" for name in TESTS]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "--deselect", LEFT_OUT]
    command = python(folder, FASTEST, "-m", "pytest", *options, *tests)
    if code := subprocess.run(command, check=False, timeout=TEST_SECONDS).returncode:
        raise SystemExit(code)
    check_bits(folder, arguments.formats.split(","))


if __name__ == "__main__":
    main()
