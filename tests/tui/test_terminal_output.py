"""Output continues after its terminal is gone."""

import io
from types import SimpleNamespace
from typing import Any, cast

from tui.terminal import TerminalOutput, surviving


class GoneStream(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(5, "Input/output error")


def test_text_goes_to_the_terminal() -> None:
    stream, gone = io.StringIO(), list[bool]()
    output = TerminalOutput(stream, lambda: gone.append(True))
    assert output.write("abc") == 3
    output.flush()
    assert (stream.getvalue(), gone) == ("abc", [])


def test_a_lost_terminal_is_reported_once_and_not_written_to() -> None:
    gone = list[bool]()
    output = TerminalOutput(GoneStream(), lambda: gone.append(True))
    for _ in range(3):
        output.write("abc")
        output.flush()
    assert gone == [True]


class CountingDriver:
    """Counts how often it was restarted."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._file = io.StringIO()
        self.resumed = 0

    def suspend_application_mode(self) -> None:
        """Nothing to stop."""

    def resume_application_mode(self) -> None:
        self.resumed += 1


def test_a_terminal_is_taken_up_again_only_where_it_was_let_go() -> None:
    driver = surviving(cast("Any", CountingDriver))(cast("Any", SimpleNamespace()))
    driver.resume_application_mode()  # SIGCONT, which a hang-up sends
    assert cast("Any", driver).resumed == 0
    driver.suspend_application_mode()
    driver.resume_application_mode()
    driver.resume_application_mode()
    assert cast("Any", driver).resumed == 1
