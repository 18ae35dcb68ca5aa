"""localllm service, with fakes of systemctl, launchctl and schtasks that record how they were called."""

import configparser
import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from localllm import service
from localllm.errors import RequestError

URL = "http://127.0.0.1:8123"
COMMAND = ["/opt/a b/python", "-P", "-m", "localllm", "serve", "--model", 'the "50 %" $HOME.gguf']

if sys.platform == "win32":
    pytest.skip("The fakes are shell scripts.", allow_module_level=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder; the fakes of the service managers are on PATH and write calls to `calls`."""
    (tmp_path / "bin").mkdir()
    for name in ("systemctl", "launchctl", "schtasks"):
        script = tmp_path / "bin" / name
        script.write_text(
            f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/calls"\n'
            f'[ -e "{tmp_path}/sleeps" ] && exec sleep 600\n'
            f'[ -e "{tmp_path}/fails" ] && case "$*" in $(cat "{tmp_path}/fails")) echo "no luck" >&2; exit 3;; esac\n'
            "exit 0\n",
            encoding="utf-8",
        )
        script.chmod(0o755)
    for name in [name for name in os.environ if name.startswith(("XDG_", "LOCALLLM_", "OLLAMA_"))]:
        if name != "LOCALLLM_KERNEL_CACHE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setenv("APPDATA", str(tmp_path / "roaming"))
    return tmp_path


def calls(home: Path) -> list[str]:
    path = home / "calls"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def files_in(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file() and path.parent.name != "bin" and path.name != "calls"]


def command_line(home: Path, *words: str, answer: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localllm", "service", *words],
        input=answer or "",
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
    )


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_install_and_uninstall_leave_nothing_behind(home: Path, system: str) -> None:
    manager = service.manager(system)
    files = service.contents(manager, COMMAND, home, URL, 30)
    service.install(manager, files)
    assert sorted(files_in(home)) == sorted(files)
    assert service.is_installed(manager) and service.address(manager) == URL
    assert calls(home) == [" ".join(command) for command in manager.start]
    service.install(manager, files)  # again, such as with other options
    assert service.uninstall(manager) == [manager.unit, manager.menu]
    assert files_in(home) == [] and not service.is_installed(manager)


def test_the_systemd_unit_runs_the_command(home: Path) -> None:
    manager = service.manager("linux")
    unit = service.contents(manager, COMMAND, home, URL, 30)[manager.unit].decode()
    assert 'ExecStart="/opt/a b/python" -P -m localllm serve --model "the \\"50 %%\\" $$HOME.gguf"\n' in unit
    assert f"WorkingDirectory={home}\n" in unit and "TimeoutStopSec=45\n" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(home: Path) -> None:
    manager = service.manager("linux")
    command = [sys.executable, *COMMAND[1:]]
    manager.unit.parent.mkdir(parents=True)
    manager.unit.write_bytes(service.contents(manager, command, home, URL, 30)[manager.unit])
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(manager.unit)], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_launchd_agent_runs_the_command(home: Path) -> None:
    manager = service.manager("darwin")
    files = service.contents(manager, COMMAND, home, URL, 30)
    agent = plistlib.loads(files[manager.unit])
    assert agent["ProgramArguments"] == COMMAND and agent["WorkingDirectory"] == str(home) and agent["RunAtLoad"]
    assert plistlib.loads(files[manager.menu]) == {"URL": URL}


def test_the_windows_task_runs_the_command(home: Path) -> None:
    manager = service.manager("win32")
    task = ElementTree.fromstring(service.contents(manager, COMMAND, home, URL, 30)[manager.unit])
    names = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    assert task.findtext(".//t:Exec/t:Command", namespaces=names) == COMMAND[0]
    arguments = task.findtext(".//t:Exec/t:Arguments", namespaces=names)
    assert arguments == '-P -m localllm serve --model "the \\"50 %\\" $HOME.gguf"'
    assert task.find(".//t:LogonTrigger/t:UserId", namespaces=names) is not None


def test_the_menu_entry_opens_the_page(home: Path) -> None:
    manager = service.manager("linux")
    entry = configparser.RawConfigParser()
    entry.optionxform = str  # type: ignore[assignment, method-assign]
    entry.read_string(service.contents(manager, COMMAND, home, URL, 30)[manager.menu].decode())
    assert entry["Desktop Entry"]["Exec"] == f"xdg-open {URL}"


def test_a_failed_start_removes_the_files(home: Path) -> None:
    (home / "fails").write_text("*restart*", encoding="utf-8")
    manager = service.manager("linux")
    with pytest.raises(RequestError, match="systemctl --user restart localllm` failed: no luck"):
        service.install(manager, service.contents(manager, COMMAND, home, URL, 30))
    assert [path.name for path in files_in(home)] == ["fails"]


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_a_manager_that_does_not_answer_is_given_up(home: Path, system: str) -> None:
    """Under Wine, schtasks never ends."""
    manager = replace(service.manager(system), most_s=1.0)
    service.install(manager, service.contents(manager, COMMAND, home, URL, 30))
    (home / "sleeps").write_text("*", encoding="utf-8")
    before = files_in(home)
    for ask in (lambda: service.uninstall(manager), lambda: service.is_running(manager)):
        with pytest.raises(
            RequestError, match=r"did not answer within 1 s\. Try again, or run `localllm serve` directly"
        ):
            ask()
    assert files_in(home) == before and service.is_installed(manager), "the service would go on without its file"
    (home / "sleeps").unlink()
    service.uninstall(manager)
    (home / "sleeps").write_text("*", encoding="utf-8")
    with pytest.raises(RequestError, match=r"could not be installed: `.*` did not answer within 1 s"):
        service.install(manager, service.contents(manager, COMMAND, home, URL, 30))
    assert files_in(home) == [home / "sleeps"]


def test_other_systems_have_no_services() -> None:
    with pytest.raises(RequestError, match="not supported on freebsd14"):
        service.manager("freebsd14")


@pytest.mark.skipif(sys.platform != "linux", reason="runs the command of this system")
class TestCommand:
    """The command itself, on Linux."""

    def test_install_status_uninstall(self, home: Path) -> None:
        done = command_line(home, "install", "--yes", "--", "--port", "8123", "--ctx", "4096")
        assert done.returncode == 0, done.stderr
        unit = home / ".config/systemd/user/localllm.service"
        (line,) = [line for line in unit.read_text(encoding="utf-8").splitlines() if line.startswith("ExecStart=")]
        assert shlex.split(line)[1:] == ["-P", "-m", "localllm", "serve", "--port", "8123", "--ctx", "4096"]
        assert str(unit) in done.stderr and "systemctl --user enable localllm" in done.stderr  # what is shown first
        status = command_line(home, "status")
        assert "started" in status.stdout and f"{URL} (does not answer)" in status.stdout
        (home / "fails").write_text("*is-active*", encoding="utf-8")
        assert "not started" in command_line(home, "status").stdout
        done = command_line(home, "uninstall", "--yes")
        assert done.returncode == 0 and f"Removed {unit}." in done.stdout
        assert [path.name for path in files_in(home)] == ["fails"]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["install"], "add --yes"),
            (["install", "--yes", "--", "--prot", "1"], "No such option: --prot"),
            (["install", "--yes", "--", "--port", "0"], "fixed port"),
            (["install", "--yes", "--", "--host", "0.0.0.0"], "no API key is set"),
            (["install", "--yes", "--", "--keep-alive", "soon"], "keep_alive"),
            (["status"], "No service is installed"),
            (["uninstall", "--yes"], "No service is installed"),
            (["restart"], "no action 'restart'"),
            (["uninstall", "--yes", "--", "--port", "1"], "takes no options"),
        ],
    )
    def test_refusals_change_nothing(self, home: Path, words: list[str], message: str) -> None:
        refused = command_line(home, *words)
        assert refused.returncode == 2 and message in refused.stderr
        assert files_in(home) == []

    def test_a_file_of_the_user_stays(self, home: Path) -> None:
        unit = home / ".config/systemd/user/localllm.service"
        unit.parent.mkdir(parents=True)
        unit.write_text("[Service]\nExecStart=/bin/true\n", encoding="utf-8")
        refused = command_line(home, "install", "--yes")
        assert refused.returncode == 2 and str(unit) in refused.stderr
        assert command_line(home, "uninstall", "--yes").returncode == 2
        assert files_in(home) == [unit]

    def test_without_a_session_one_sentence_says_what_to_do(self, home: Path) -> None:
        (home / "fails").write_text("*show-environment*", encoding="utf-8")
        refused = command_line(home, "install", "--yes")
        assert refused.returncode == 2 and "No systemd user session" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1 and files_in(home) == [home / "fails"]

    def test_variables_that_the_service_does_not_see_are_named(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOCALLLM_CTX", "2048")
        assert "LOCALLLM_CTX" in command_line(home, "install", "--yes").stderr
