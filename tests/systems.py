"""What tests need to know about the system that they run on, and where localllm keeps things there."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ON_WINE = False
"""Whether this is Windows' API under Wine, which accepts some limits and does not enforce them."""
if sys.platform == "win32":
    ON_WINE = hasattr(ctypes.windll.ntdll, "wine_get_version")
    KILL, KILLED, STOP = signal.SIGTERM, int(signal.SIGTERM), signal.SIGINT
else:
    KILL, KILLED, STOP = signal.SIGKILL, -signal.SIGKILL, signal.SIGTERM
"""The signal for os.kill that ends a process at once, and Popen's return code of a process that got it; the signal for
Forked.send_signal that asks a server to end."""


def _can_link() -> bool:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
        os.symlink("a", os.path.join(folder, "b"))
        return os.path.islink(os.path.join(folder, "b"))
    return False


CAN_LINK = _can_link()
needs_links = pytest.mark.skipif(not CAN_LINK, reason="symbolic links cannot be made here, as on Wine")
FULL = "/dev/full"
needs_full_device = pytest.mark.skipif(
    sys.platform == "win32" or not os.path.exists(FULL), reason="there is no device that is always full here"
)
needs_named_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
needs_commands = pytest.mark.skipif(shutil.which("sleep") is None, reason="there are no commands ls, touch and sleep")
needs_consoles = pytest.mark.skipif(sys.platform != "win32", reason="this system has no consoles")
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot interrupt a process by a signal")


needs_shell = pytest.mark.skipif(shutil.which("sh") is None, reason="there is no POSIX shell here")
needs_modes = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has access lists, which the tests of texts cover"
)


OWN_CONSOLE: dict[str, Any] = {"creationflags": 0x08000000} if sys.platform == "win32" else {}  # CREATE_NO_WINDOW
"""Arguments of Popen for a process that `press_ctrl_c` reaches, and no other one."""
_PRESS = """
import ctypes, sys
kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
kernel32.FreeConsole()
for call, *arguments in (
    (kernel32.AttachConsole, int(sys.argv[1])),
    (kernel32.SetConsoleCtrlHandler, None, True),  # this process ignores it
    (kernel32.GenerateConsoleCtrlEvent, 0, 0),
):
    if not call(*arguments):
        raise ctypes.WinError(ctypes.get_last_error())
"""


def press_ctrl_c(pid: int) -> None:
    """Interrupt a process as Ctrl-C in its terminal does."""
    if sys.platform == "win32":
        subprocess.run([sys.executable, "-c", _PRESS, str(pid)], check=True)
    else:
        os.kill(pid, signal.SIGINT)


def make_program(path: Path, code: str) -> Path:
    """Write a program in Python and return what starts it: on Windows a batch file beside it, as npm installs them."""
    path.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    path.chmod(0o755)
    if sys.platform != "win32":
        return path
    started = path.with_suffix(".cmd")
    started.write_text(f'@"{sys.executable}" "%~dp0{path.name}" %*\n', encoding="utf-8")
    return started


def make_terminal(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a stream count as a terminal."""
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    if sys.platform == "win32":
        monkeypatch.setattr(stream, "fileno", lambda: 0, raising=False)
        monkeypatch.setattr("gguf_io.windows.is_console", lambda _fd: True)


CACHE = Path("localllm", "Cache") if sys.platform == "win32" else Path("localllm")
"""Where caches are, below the folder of `own_places`."""


def own_places(folder: Path) -> dict[str, str]:
    """Variables that put everything below a folder, on every system: localllm's own files into its folder localllm.

    Also what other programs keep in the user's home and caches, such as .ollama/models and huggingface/hub.
    """
    xdg = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")
    windows = ("USERPROFILE", "LOCALAPPDATA", "APPDATA", "WIN_PD_OVERRIDE_LOCAL_APPDATA")  # the last: of platformdirs
    return dict.fromkeys(("HOME", *xdg, *windows), str(folder))


def use_own_places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set these variables for a test."""
    for name, value in own_places(folder).items():
        monkeypatch.setenv(name, value)
