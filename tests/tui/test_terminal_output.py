"""Output outlives its terminal."""

import io

from tui.terminal import TerminalOutput


class GoneStream(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(5, "Input/output error")


def test_text_goes_to_the_terminal() -> None:
    stream, gone = io.StringIO(), list[bool]()
    output = TerminalOutput(stream, lambda: gone.append(True))
    assert output.write("abc") == 3
    output.flush()
    assert (stream.getvalue(), gone) == ("abc", [])


def test_a_terminal_that_went_is_told_of_once_and_written_to_no_more() -> None:
    gone = list[bool]()
    output = TerminalOutput(GoneStream(), lambda: gone.append(True))
    for _ in range(3):
        output.write("abc")
        output.flush()
    assert gone == [True]
