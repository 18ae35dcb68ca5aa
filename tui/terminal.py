"""The terminal that the chat draws on, and what happens when it goes away."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textual.driver import Driver


class TerminalOutput:
    """A terminal's stream of text that can be written to when the terminal has gone: nobody sees that any more.

    Textual's writing thread would end with an error there, and its application then wait for it for ever. on_gone is
    called once, by the thread that finds out.
    """

    def __init__(self, stream: Any, on_gone: Callable[[], object]) -> None:
        self._stream = stream
        self._on_gone = on_gone
        self._gone = False

    def write(self, text: str) -> int:
        """Write, as far as there is a terminal."""
        self._unless_gone(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, as far as there is a terminal."""
        self._unless_gone(self._stream.flush)

    def fileno(self) -> int:
        """The stream's."""
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        """The stream's."""
        return bool(self._stream.isatty())

    def _unless_gone(self, action: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError:
            self._gone = True
            self._on_gone()


def surviving(driver: "type[Driver]") -> "type[Driver]":
    """A driver that has the application leave where its terminal goes away without a signal.

    Windows' drivers are returned as they are: there, the program ends with its console.
    """
    if sys.platform == "win32":
        return driver

    class SurvivingDriver(driver):  # type: ignore[valid-type,misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            screen: Any = self._file  # type: ignore[has-type]
            self._file = TerminalOutput(screen, lambda: self._app.call_later(self._app.leave_without_terminal))
            self._suspended = False

        def suspend_application_mode(self) -> None:
            self._suspended = True
            super().suspend_application_mode()

        def resume_application_mode(self) -> None:
            # A hang-up brings SIGCONT as well. A second thread that reads the keys would never end.
            if self._suspended:
                self._suspended = False
                super().resume_application_mode()

    return SurvivingDriver
