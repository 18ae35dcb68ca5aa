import io
import logging
from collections.abc import Iterator

import pytest

from localllm.front import terminal
from tests.systems import make_terminal


def on_screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    make_terminal(stream, monkeypatch)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(terminal, "obeys_escapes", lambda _stream: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


@pytest.fixture
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    terminal.answer("a\x1b[2Jb\tc\n\x9b\r\x07")
    assert screen.getvalue() == "a\ufffd[2Jb\tc\n\ufffd\ufffd\ufffd"


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.answer("a\x1b[2J\r\n")
    assert capsys.readouterr().out == "a\x1b[2J\r\n"


def test_colour_on_terminals_only_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    terminal.fail("x")
    assert "\x1b[31m" in screen.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    screen.truncate(0)
    terminal.fail("x")
    assert "\x1b[31m" not in screen.getvalue()


def test_diagnostics_go_to_stderr_without_colour_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.fail("bad")
    terminal.warn("odd")
    terminal.note("so")
    assert capsys.readouterr() == ("", "error: bad\nwarning: odd\nso\n")


def test_progress_is_drawn_on_terminals_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    with terminal.StatusLine() as status:
        status.share("loading", 0.5)
        assert screen.getvalue().endswith("loading: 50%")
    assert screen.getvalue().endswith(terminal.CLEAR_LINE)


def test_a_warning_replaces_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    with terminal.StatusLine() as status:
        status.show("loading")
        terminal.note("by the way")
        assert screen.getvalue().endswith(f"loading{terminal.CLEAR_LINE}by the way\n")


def test_progress_in_a_pipe_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.StatusLine() as status:
        status.share("loading", 0.5)
        status.share("loading", 1.0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("logging_restored")
def test_logs_show_tracebacks_with_debug_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for debug in (False, True):
        terminal.log_to_stderr(debug)
        log = logging.getLogger("localllm.test")
        log.debug("detail")
        log.warning("careful")
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("stopped")
        error = capsys.readouterr().err
        assert "warning: careful\nerror: stopped\n" in error
        assert ("Traceback" in error) == debug
        assert ("localllm.test: detail" in error) == debug
