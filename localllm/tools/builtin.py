"""The built-in tools of a folder."""

from localllm.tools.action import Tool
from localllm.tools.command import command_tool
from localllm.tools.editing import editing_tool
from localllm.tools.folder import Folder
from localllm.tools.journal import Journal
from localllm.tools.reading import reading_tools


def builtin_tools(folder: Folder, journal: Journal) -> list[Tool]:
    """Read, list, search, edit a file, run a command."""
    return [*reading_tools(folder), editing_tool(folder, journal), command_tool(folder)]
