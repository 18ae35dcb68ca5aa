"""Wheels, an index that serves them, and an environment to install them into, which is thrown away."""

import base64
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

from gpu_offload.builds import VERSION
from tests.localllm.library.model_server import ModelServer

ROOT = Path(__file__).resolve().parents[2]
OLD = {"llama_cpp/__init__.py": b"OLD = True\n", "llama_cpp/lib/libllama.so": b"old", "llama_cpp/gone.py": b"1\n"}

# In every Python of the throwaway environment, pip's included: writing fails as on a full disk where the test says.
FULL_DISK = """
import errno, io, os, shutil

where, copy, open_file = os.environ.get("TEST_FULL"), shutil.copyfileobj, io.open

def copied(source, target, *more):
    if where == "install" and ".localllm-" not in target.name and target.name.endswith("last.py"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return copy(source, target, *more)

class Full(io.BytesIO):
    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

def opened(file, mode="r", *more, **options):
    full = where == "download" and mode == "xb" and str(file).endswith(".whl")
    return Full() if full else open_file(file, mode, *more, **options)

shutil.copyfileobj, io.open = copied, opened
"""


def wheel(files: Mapping[str, bytes], version: str = VERSION, tag: str = "py3-none-any") -> tuple[str, bytes]:
    """The name and the content of a wheel of llama-cpp-python with these files."""
    info = f"llama_cpp_python-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return f"llama_cpp_python-{version}-{tag}.whl", packed.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Index(ModelServer):
    """An index of wheels."""

    def offer(self, name: str, data: bytes, sha256: str | None = None) -> None:
        """Serve one wheel, with its own or another hash; "" for none."""
        stated = hashlib.sha256(data).hexdigest() if sha256 is None else sha256
        self.routes[f"/files/{name}"] = data
        fragment = f"#sha256={stated}" if stated else ""
        page = f'<html><body><a href="../files/{name}{fragment}">{name}</a><a>none</a></body></html>'
        self.routes["/llama-cpp-python/"] = page.encode()


def installed_files() -> dict[str, bytes]:
    """The files of the llama-cpp-python that runs here, for a wheel of it."""
    here = distribution("llama-cpp-python")
    names = [str(file) for file in here.files or ()]
    own = [name for name in names if name.startswith("llama_cpp/") and "__pycache__" not in name]
    return {name: Path(str(here.locate_file(name))).read_bytes() for name in own}


class Environment:
    """A virtual environment that sees the packages of this one."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = next(iter(folder.glob("[bS]*in*/python*")))
        self.site = next(iter(folder.rglob("site-packages")))
        paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
        (self.site / "these.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
        (self.site / "sitecustomize.py").write_text(FULL_DISK, encoding="utf-8")

    def pip_install(self, path: Path) -> None:
        """Install a wheel."""
        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--force-reinstall",
            str(path),
        ]
        subprocess.run(command, check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})

    def install(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), "-B", "-c", "from localllm.__main__ import main; main()", "gpu", "install", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **variables},
        )

    def state(self) -> dict[str, bytes | None]:
        """Every path in the environment with its content."""
        found = self.site.parents[2].rglob("*")
        return {
            str(path): path.read_bytes() if path.is_file() else None for path in found if "__pycache__" not in str(path)
        }
