"""Files as the editor has them, with what is not saved yet."""

import threading
from pathlib import Path

from acp import Client, schema
from acp import RequestError as ClientError

from localllm.actions.action import ToolError
from localllm.actions.folder import Files, read_bytes
from tui.acp.asking import EditorQuestions


class EditorFiles(Files):
    """Reads and writes through the editor, as far as it offers that. For threads, while the client's loop runs."""

    def __init__(
        self, client: Client, session: str, offered: schema.FileSystemCapabilities, stopping: threading.Event
    ) -> None:
        """stopping: ends what waits for the editor."""
        self._client, self._session, self._offered = client, session, offered
        self._ask = EditorQuestions(stopping).ask

    def unsaved(self, path: Path) -> str | None:
        if not self._offered.read_text_file:
            return None
        try:
            disk = read_bytes(path).decode()
        except FileNotFoundError:
            disk = None
        except UnicodeDecodeError:
            return None
        try:
            text = self._ask(self._client.read_text_file(session_id=self._session, path=str(path))).content
        except ClientError:  # the editor does not know the file, or not such a one; the disk has it, or nobody
            return None
        return None if disk is not None and _lines(text) == _lines(disk) else text

    def write(self, path: Path, content: bytes) -> bool:
        if not self._offered.write_text_file:
            if self.unsaved(path) is not None:
                raise ToolError(f"{path.name}: has changes that the editor has not saved. Save the file first.")
            return False
        try:
            text = content.decode()
            self._ask(self._client.write_text_file(session_id=self._session, path=str(path), content=text))
        except ClientError as error:
            raise ToolError(f"{path.name}: the editor did not write it: {error}") from error
        return True


def _lines(text: str) -> str:
    """A text with the line ends that editors have in memory."""
    return text.replace("\r\n", "\n")
