"""A server that the system starts with the user's session: a systemd user unit, a launchd agent or a Windows task."""

import getpass
import os
import plistlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from gguf_io.system import as_utf_8, make_folder, read_file, run_within, shell_line
from localllm.errors import RequestError
from localllm.files import write_whole

NAME = "localllm"
MARK = "Written by `localllm service install`"
_LABEL = "localllm.serve"  # launchd's name of the service
_STOP_S = 15  # added to the time that running requests get when the server stops
Command = tuple[str, ...]


class NoAnswerError(RequestError):
    """A program that manages services does not end. It is killed then."""


@dataclass(frozen=True, slots=True)
class Manager:
    """What starts services on one system, and where its files are.

    unit: the file that describes the service. menu: the menu entry that opens the page. session: a command that fails
    if services cannot be managed from here, for the reason `no_session`. state: a command that succeeds if the service
    is running. logs: where to find what the server prints. most_s: how long each command may take; most managers wait
    while the service stops.
    """

    system: str
    unit: Path
    menu: Path
    start: tuple[Command, ...]
    stop: tuple[Command, ...]
    state: Command
    session: Command | None = None
    no_session: str = ""
    logs: str = ""
    after_removal: tuple[Command, ...] = ()
    most_s: float = 600.0


def manager(system: str) -> Manager:
    """The service manager of a system, as sys.platform names it. Raises RequestError if there is none."""
    home = Path.home()
    if system == "darwin":
        unit, domain = home / "Library/LaunchAgents" / f"{_LABEL}.plist", f"gui/{home.stat().st_uid}"
        return Manager(
            system,
            unit=unit,
            menu=home / "Applications" / f"{NAME}.webloc",
            start=(("launchctl", "bootstrap", domain, str(unit)),),
            stop=(("launchctl", "bootout", f"{domain}/{_LABEL}"),),
            state=("launchctl", "print", f"{domain}/{_LABEL}"),
            logs=str(_log(home)),
        )
    if system == "win32":
        unit = Path(os.environ.get("LOCALAPPDATA", home / "AppData/Local")) / NAME / "service.xml"
        roaming = Path(os.environ.get("APPDATA", home / "AppData/Roaming"))
        task = ("/TN", NAME)
        return Manager(
            system,
            unit=unit,
            menu=roaming / "Microsoft/Windows/Start Menu/Programs" / f"{NAME}.url",
            start=(("schtasks", "/Create", *task, "/XML", str(unit), "/F"), ("schtasks", "/Run", *task)),
            stop=(("schtasks", "/End", *task), ("schtasks", "/Delete", *task, "/F")),
            state=("schtasks", "/Query", *task),
            most_s=20.0,
        )
    if system != "linux":
        raise RequestError(f"Services are not supported on {system}. Start `localllm serve` with its own tools.")
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    control = ("systemctl", "--user")
    return Manager(
        system,
        unit=configuration / "systemd/user" / f"{NAME}.service",
        menu=data / "applications" / f"{NAME}.desktop",
        start=((*control, "daemon-reload"), (*control, "enable", NAME), (*control, "restart", NAME)),
        stop=((*control, "disable", "--now", NAME),),
        state=(*control, "is-active", NAME),
        session=(*control, "show-environment"),
        no_session=(
            "No systemd user session can be reached here; containers and some SSH logins have none. Run "
            "`localllm serve` directly, or start it as a system service."
        ),
        logs=f"journalctl --user -u {NAME}",
        after_removal=((*control, "daemon-reload"),),
    )


def _log(home: Path) -> Path:
    return home / "Library/Logs" / f"{NAME}.log"


def contents(of: Manager, command: Sequence[str], folder: Path, url: str, grace_s: int) -> dict[Path, bytes]:
    """The files of a service that runs `command` in `folder` and answers at `url`."""
    mark = f"{MARK}: serves {url}"
    if of.system == "darwin":
        log = str(_log(Path.home()))
        unit = _marked(
            {
                "Label": _LABEL,
                "ProgramArguments": [*command],
                "WorkingDirectory": str(folder),
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ExitTimeOut": grace_s + _STOP_S,
                "StandardOutPath": log,
                "StandardErrorPath": log,
            },
            mark,
        )
        return {of.unit: unit, of.menu: _marked({"URL": url}, mark)}
    if of.system == "win32":
        task = _TASK.format(
            mark=escape(mark),
            user=escape(f"{os.environ.get('USERDOMAIN', '.')}\\{getpass.getuser()}"),
            program=escape(command[0]),
            arguments=escape(subprocess.list2cmdline(command[1:])),
            folder=escape(str(folder)),
        )
        link = f"[InternetShortcut]\r\nURL={url}\r\n; {mark}\r\n"
        return {of.unit: task.encode("utf-16"), of.menu: link.encode()}
    program, *arguments = (_unit_word(word) for word in command)
    unit_text = _UNIT.format(
        mark=mark,
        command=" ".join([program, *(word.replace("$", "$$") for word in arguments)]),
        folder=str(folder).replace("%", "%%"),
        stop_s=grace_s + _STOP_S,
    )
    return {of.unit: unit_text.encode(), of.menu: _MENU.format(mark=mark, url=url).encode()}


_UNIT = """# {mark}
[Unit]
Description=localllm, a server for local language models

[Service]
ExecStart={command}
WorkingDirectory={folder}
Restart=on-failure
RestartSec=5
TimeoutStopSec={stop_s}

[Install]
WantedBy=default.target
"""

_MENU = """# {mark}
[Desktop Entry]
Type=Application
Name=localllm
Comment=Chat with local language models
Exec=xdg-open {url}
Icon=internet-group-chat
Categories=Utility;
"""

# Only an administrator may add a trigger for every user's logon.
_TASK = """<?xml version="1.0" encoding="UTF-16"?>
<!-- {mark} -->
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers><LogonTrigger><UserId>{user}</UserId></LogonTrigger></Triggers>
  <Principals>
    <Principal id="Author"><UserId>{user}</UserId><LogonType>InteractiveToken</LogonType></Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>3</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{program}</Command>
      <Arguments>{arguments}</Arguments>
      <WorkingDirectory>{folder}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
"""


def _marked(properties: Mapping[str, object], mark: str) -> bytes:
    """A property list with the mark as a comment."""
    head, end, body = plistlib.dumps(properties).partition(b"<plist")
    return head + f"<!-- {mark} -->\n".encode() + end + body


def _unit_word(word: str) -> str:
    """A word of a systemd command line: % begins a specifier, and quotes take C's escapes (systemd.service(5))."""
    word = word.replace("%", "%%")
    if re.fullmatch(r"[\w@:=+,./%$-]+", word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def install(of: Manager, files: Mapping[Path, bytes]) -> None:
    """Write the files and start the service, replacing one installed before. Raises RequestError and undoes it."""
    if is_installed(of):
        _run(of, of.stop, may_fail=True)
    try:
        for path, content in files.items():
            make_folder(path.parent)
            write_whole(path, content, mode=0o644)
        _run(of, of.start)
    except (OSError, RequestError) as error:
        try:
            uninstall(of)
        except NoAnswerError:
            _remove_files(of)
        raise RequestError(f"The service could not be installed: {error}") from error


def uninstall(of: Manager) -> list[Path]:
    """Stop the service and remove its files; return them. Files that are not ours stay. Raises NoAnswerError before."""
    _run(of, of.stop, may_fail=True)
    removed = _remove_files(of)
    _run(of, of.after_removal, may_fail=True)
    return removed


def _remove_files(of: Manager) -> list[Path]:
    removed = [path for path in (of.unit, of.menu) if is_ours(path)]
    for path in removed:
        path.unlink()
    return removed


def is_installed(of: Manager) -> bool:
    """Whether a service of ours is installed."""
    return is_ours(of.unit)


def is_ours(path: Path) -> bool:
    """Whether `localllm service install` wrote the file."""
    return MARK in _text(path)


def address(of: Manager) -> str | None:
    """The address at which the installed service serves."""
    found = re.search(rf"{MARK}: serves (\S+)", _text(of.unit))
    return found[1] if found else None


def foreign(files: Mapping[Path, bytes]) -> Path | None:
    """A file that exists and is not ours, which installing would overwrite."""
    return next((path for path in files if os.path.lexists(path) and not is_ours(path)), None)


def check_session(of: Manager) -> None:
    """Raise RequestError if services cannot be managed from here."""
    program = of.state[0]
    if shutil.which(program) is None:
        raise RequestError(of.no_session or f"There is no program {program} here, which manages services.")
    if of.session and _asked(of, of.session).returncode:
        raise RequestError(of.no_session)


def is_running(of: Manager) -> bool:
    """Whether the manager says that the service runs; on Windows, that its task exists."""
    return _asked(of, of.state).returncode == 0


def _text(path: Path) -> str:
    """A file's text in its encoding; empty if there is none."""
    try:
        content = read_file(path)
    except OSError:
        return ""
    return content.decode("utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8", errors="replace")


def _run(of: Manager, commands: Sequence[Command], may_fail: bool = False) -> None:
    for command in commands:
        result = _asked(of, command)
        if result.returncode and not may_fail:
            text = as_utf_8(result.stderr or result.stdout).decode(errors="replace")
            said = " ".join(text.split()) or f"exit status {result.returncode}"
            raise RequestError(f"`{shell_line(command)}` failed: {said}")


def _asked(of: Manager, command: Command) -> "subprocess.CompletedProcess[bytes]":
    try:
        return run_within(of.most_s, command)
    except subprocess.TimeoutExpired as error:
        reason = f"`{shell_line(command)}` did not answer within {of.most_s:g} s"
        raise NoAnswerError(f"{reason}. Try again, or run `localllm serve` directly.") from error


def shown(files: Mapping[Path, bytes], commands: Sequence[Command]) -> Iterator[str]:
    """Lines that say what installing does."""
    for path in files:
        yield f"{path}:"
        content = files[path]
        encoding = "utf-16" if content.startswith(b"\xff\xfe") else "utf-8"
        yield from (f"    {line}" for line in content.decode(encoding).splitlines())
    yield "Commands:"
    yield from (f"    {shell_line(command)}" for command in commands)
