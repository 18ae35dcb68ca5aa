"""localllm service: a server that starts with the user's session."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_io.system import is_terminal, shell_line
from localllm.cli.main import application
from localllm.errors import RequestError
from localllm.front.local_server import LocalServer
from localllm.front.options import setting_flags
from localllm.front.terminal import answer, note, warn

if TYPE_CHECKING:
    from localllm.service import Manager


def service(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="install, status or uninstall.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Options of `serve`.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Keep a server running from login on: install, status, uninstall.

    `install` shows the files and commands first, and asks: a systemd user unit (Linux), a launchd agent (macOS) or a
    scheduled task (Windows), and a menu entry that opens the server's page. The service reads config.toml, not the
    variables of this shell. Paths in its options are relative to the current folder. `uninstall` stops the service and
    removes only these files.
    """
    from localllm import service as services

    manager = services.manager(sys.platform)
    if action not in ("install", "status", "uninstall"):
        raise RequestError(f"`localllm service` has no action {action!r}. Choose install, status or uninstall.")
    if arguments and action != "install":
        raise RequestError(f"`localllm service {action}` takes no options of `serve`.")
    if action == "install":
        _install(manager, arguments or [], yes)
    elif not services.is_installed(manager):
        raise RequestError("No service is installed. `localllm service install` installs one.")
    elif action == "uninstall":
        _confirm(f"Stop the service and remove {manager.unit}?", yes)
        for path in services.uninstall(manager):
            answer(f"Removed {path}.\n")
    else:
        _show_state(manager)


def _install(manager: "Manager", options: list[str], yes: bool) -> None:
    from localllm import service as services

    url, grace_s = _checked(options)
    services.check_session(manager)
    command = [_interpreter(), "-P", "-m", "localllm", "serve", *options]
    files = services.contents(manager, command, Path.cwd(), url, grace_s)
    if path := services.foreign(files):
        raise RequestError(f"{path} exists, and `localllm service install` did not write it. Move it away first.")
    for line in services.shown(files, manager.start):
        note(line)
    if unseen := sorted(name for name in os.environ if name.startswith(("LOCALLLM_", "OLLAMA_"))):
        warn(f"The service does not see variables of this shell: {', '.join(unseen)}. Use config.toml or options.")
    _confirm("Install and start this service?", yes)
    services.install(manager, files)
    answer(f"The service is installed and serves {url}. `localllm service status` shows its state.\n")
    if manager.logs:
        note(f"Its messages: {manager.logs}")


def _checked(options: list[str]) -> tuple[str, int]:
    """The address and grace_s of a server with these options. Raises RequestError if `serve` would refuse them."""
    from localllm.remote.connection import Endpoint, reachable
    from localllm.server.options import checked_options

    group = typer.main.get_command(application({"serve": "localllm.cli.serve:serve"}))
    context = group.commands["serve"].make_context("localllm serve", [*options])  # type: ignore[attr-defined]
    settings = checked_options(setting_flags(context), context.params["without_key"], {}).settings
    if settings.port == 0:
        raise RequestError("A service needs a fixed port, so that programs find it. Choose one with --port.")
    return str(Endpoint(False, reachable(settings.host), settings.port, "")), settings.grace_s


def _interpreter() -> str:
    """The Python that runs the service; on Windows the one that opens no window."""
    quiet = Path(sys.executable).with_name("pythonw.exe")
    return str(quiet) if os.path.isfile(quiet) else sys.executable


def _confirm(question: str, yes: bool) -> None:
    """Ask on the terminal. Raises RequestError if there is none, typer.Exit if the answer is no."""
    if yes:
        return
    if not is_terminal(sys.stdin):
        raise RequestError(f"{question} Nothing was changed, because there is no terminal to ask on: add --yes.")
    if not typer.confirm(question, err=True):
        note("Nothing was changed.")
        raise typer.Exit


def _show_state(manager: "Manager") -> None:
    from localllm import service as services

    services.check_session(manager)
    url = services.address(manager) or ""
    answers = LocalServer(url, 0).runs()
    answer(f"file     {manager.unit}\n")
    answer(f"state    {'started' if services.is_running(manager) else 'not started'} ({shell_line(manager.state)})\n")
    answer(f"address  {url} ({'answers' if answers else 'does not answer'})\n")
    if manager.logs:
        answer(f"logs     {manager.logs}\n")
