"""Output that cannot be written: a full disk, a reader that has left, at the interpreter's exit too."""

import os
import subprocess
import sys

import pytest

from tests.systems import FULL, needs_full_device

PROGRAM = "from localllm.__main__ import main; main()"
COMMANDS = [
    ["list"],
    ["--help"],
    ["run", "--help"],
    ["--version"],
    ["completion", "bash"],
    ["show", "builtin"],
    ["config"],
]


def ended(arguments: list[str], code: str = PROGRAM, **streams: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code, *arguments], text=True, check=False, **streams)  # type: ignore[call-overload,no-any-return]


@needs_full_device
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_disk(arguments: list[str]) -> None:
    with open(FULL, "wb") as full:
        done = ended(arguments, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: The disk is full. Free some space")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_reader_that_has_left(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = ended(arguments, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, "")


@needs_full_device
def test_messages_that_cannot_be_written_change_nothing() -> None:
    with open(FULL, "wb") as full:
        assert ended(["show", "no-such-model"], stdout=subprocess.PIPE, stderr=full).returncode == 2
        listed = ended(["list"], stdout=subprocess.PIPE, stderr=full)
        assert ended(["list"], stdout=full, stderr=full).returncode == 2
    assert (listed.returncode, "builtin" in listed.stdout) == (0, True)


@needs_full_device
def test_what_a_library_writes_and_does_not_flush() -> None:
    code = "import sys\nfrom localllm.front.terminal import reported_errors\nwith reported_errors():\n"
    with open(FULL, "wb") as full:
        done = ended([], f"{code}    sys.stdout.write('x')\n    sys.exit(0)", stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_other_reasons() -> None:
    with open(os.devnull, "rb") as file:
        done = ended(["list"], stdout=file, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == "error: The output cannot be written: Bad file descriptor. Send it elsewhere.\n"
