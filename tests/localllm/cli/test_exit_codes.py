"""How commands end: one sentence that says what to do, and a reliable exit code."""

import errno
import os
import subprocess
import sys

import pytest

from localllm.cli.main import main
from localllm.errors import RequestError
from localllm.front.terminal import ExitCode, reported_errors

PROGRAM = [sys.executable, "-c", "from tui.main import main; main()"]


def called(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["run", "builtin", "Hi", "there"],
            "'there' is a second prompt. Put a prompt of several words between",
        ),
        (["list", "all"], "Unexpected argument 'all'. `localllm list --help`"),
        (["run", "--xyzzy"], "No such option: --xyzzy. `localllm run --help`"),
        (["rnu"], "No such command 'rnu'. Did you mean 'run'? `localllm --help`"),
        (["run"], "Missing argument"),
        (["simulate", "--slots", "0"], "Invalid value for '--slots': must be at least 1 (got 0). `localllm"),
        (["simulate", "--slots", "-1"], "'--slots': must be at least 1 (got -1)"),
        (["simulate", "--devices", "x"], "'--devices': must be a whole number (got x)"),
        (["simulate", "--bandwidth", "nan"], "'--bandwidth': must be a number (got nan)"),
        (["bench", "--prompt", "0"], "'--prompt': must be at least 1 (got 0)"),
        (["cost", "--for", "0"], "'--for': must be at least 0.001 (got 0)"),
        (["show", "~no-such-user/x.gguf"], "~no-such-user/x.gguf"),
        (["pull", "http://["], "'http://[' is not a valid address"),
        (["show", "x" * 100_000], "There is no model 'xxx"),
    ],
)
def test_wrong_calls_are_refused_in_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["localllm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == ExitCode.REFUSED
    assert err.startswith("error: ") and words in err and err.count("\n") == 1 and len(err) < 1000, err
    assert out == ""


def test_too_little_memory_is_not_a_bug() -> None:
    resource = pytest.importorskip("resource", reason="Windows has no such module")

    def without_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))

    ended = called("run", "builtin", "hi", "--max-tokens", "1", preexec_fn=without_memory)
    assert ended.returncode == ExitCode.REFUSED, ended.stderr
    assert "does not fit into memory" in ended.stderr and "defect" not in ended.stderr


def test_an_unusable_instruction_set_is_not_a_bug() -> None:
    ended = called("doctor", env={**os.environ, "LOCALLLM_ISA": "avx1024"})
    assert ended.returncode == ExitCode.REFUSED, ended.stderr
    assert "LOCALLLM_ISA='avx1024': unknown. Choose one of" in ended.stderr and "defect" not in ended.stderr


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_memory_that_runs_out_later_is_not_a_bug(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, reported_errors():
        raise error
    assert ended.value.code == ExitCode.REFUSED
    assert "not enough memory" in capsys.readouterr().err


def test_a_message_has_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), reported_errors():
        raise RequestError("x" * 10_000_000)
    assert len(capsys.readouterr().err) < 5000


def closed_stdout() -> None:
    os.close(1)


@pytest.mark.parametrize("arguments", [["list"], ["--help"], ["show", "builtin"]])
def test_unwritable_output_is_a_failure(arguments: list[str]) -> None:
    ended = called(*arguments, preexec_fn=closed_stdout)
    assert ended.returncode == ExitCode.UNREAD
    assert ended.stderr == ""
