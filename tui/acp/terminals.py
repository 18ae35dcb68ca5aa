"""Commands in the editor's terminals, where the user sees what they print."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable

from acp import Client
from acp import RequestError as ClientError

from gguf_io.system import SHELL
from localllm.actions.action import MAX_RESULT_CHARS, ToolError
from localllm.actions.folder import LIMIT_S, Folder
from tui.acp.asking import EditorQuestions


class EditorTerminals:
    """Runs commands in terminals that the editor opens and shows. For threads, while the client's loop runs."""

    def __init__(
        self, client: Client, session: str, stopping: threading.Event, show: Callable[[str], Awaitable[None]]
    ) -> None:
        """stopping: ends what waits for the editor. show: called with the id of each terminal."""
        self._client, self._session, self._show = client, session, show
        self._ask = EditorQuestions(stopping).ask

    def run(self, command: str, folder: Folder, _stop: threading.Event) -> str:
        """A RunCommand. If the user stops, the editor ends the command."""
        try:
            return self._ask(self._run(command, folder))
        except ClientError as error:
            raise ToolError(f"The editor did not run the command: {error}") from error

    async def _run(self, command: str, folder: Folder) -> str:
        program, *words = SHELL
        client, session = self._client, self._session
        made = await client.create_terminal(
            session_id=session,
            command=program,
            args=[*words, command],
            cwd=os.fspath(folder.root),
            output_byte_limit=MAX_RESULT_CHARS,
        )
        terminal = made.terminal_id
        try:
            await self._show(terminal)
            try:
                async with asyncio.timeout(LIMIT_S):
                    ended = await client.wait_for_terminal_exit(session_id=session, terminal_id=terminal)
                how = f"ended by {ended.signal}" if ended.signal else f"exit status {ended.exit_code}"
            except TimeoutError:
                await client.kill_terminal(session_id=session, terminal_id=terminal)
                how = f"ended after {LIMIT_S} s"
            printed = await client.terminal_output(session_id=session, terminal_id=terminal)
        finally:
            await client.release_terminal(session_id=session, terminal_id=terminal)
        text = printed.output.replace("\r\n", "\n")
        cut = "[the beginning is left out]\n" if printed.truncated else ""
        return f"{cut}{text}\n[{how}]"
