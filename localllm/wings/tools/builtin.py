"""What a conversation may use in a folder: the built-in tools, their journal, and the MCP servers."""

from collections.abc import Mapping
from typing import Any

from localllm.actions.action import Action, FileChange, Tool
from localllm.actions.folder import Folder, RunCommand
from localllm.settings import journal_path
from localllm.wings.tools.command import command_tool
from localllm.wings.tools.editing import diff, editing_tool
from localllm.wings.tools.journal import Change, Journal
from localllm.wings.tools.mcp_servers import McpServers, read_servers, servers_path
from localllm.wings.tools.reading import reading_tools


def builtin_tools(folder: Folder, journal: Journal, run: RunCommand | None = None) -> list[Tool]:
    """Read, list, search, edit a file, run a command. run: see command_tool."""
    return [*reading_tools(folder), editing_tool(folder, journal), command_tool(folder, run)]


class FolderTools:
    """The tools of a folder, and of the MCP servers that have been started. `close` ends the servers.

    problems: why servers did not start.
    """

    def __init__(self, folder: Folder, owner: str = "", run: RunCommand | None = None) -> None:
        """owner: of the changes in the journal. run: see command_tool."""
        self.folder = folder
        self.journal = Journal(journal_path(), folder.root, owner, folder.files)
        self._builtin = builtin_tools(folder, self.journal, run)
        self.tools = self._builtin
        self.problems: list[str] = []
        self._run = run
        self._servers: McpServers | None = None

    def start_servers(self, more: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Add the tools of the servers in mcp.json, and of more in its format. Raises SettingsError."""
        self._servers = McpServers({**read_servers(servers_path()), **(more or {})})
        self.problems = self._servers.problems
        self.tools = [*self._builtin, *self._servers.tools]

    def command(self, text: str) -> Action:
        """The action that runs a command of the user's. Raises ToolError."""
        return command_tool(self.folder, self._run).plan({"command": text})

    def undoing(self, change: Change) -> Action:
        """A change in reverse, to be shown: the journal undoes it."""
        name = self.folder.name(change.path)
        back = FileChange(change.path, change.after, change.before)
        return Action("undo", name, diff(name, change.after, change.before), lambda _stop: "", change=back)

    def close(self) -> None:
        """End the servers. Idempotent."""
        if self._servers is not None:
            self._servers.close()
