"""Commands pull the models that they need, with progress on stderr."""

import contextlib
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import typer

from localllm.front.terminal import ExitCode, StatusLine, note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from localllm.library.entry import LibraryModel
    from localllm.library.places import Places
    from localllm.library.pull import PullProgress

ResultT = TypeVar("ResultT")


def obtain(name: str, where: "Places") -> "LibraryModel":
    """Find a model by name, or pull it, with progress on terminals. Raises LibraryError."""
    from localllm.front.models import find_or_pull

    with resumable(name, "pull") as status:
        return find_or_pull(name, where, status.share)


def with_progress(name: str, work: "Callable[[PullProgress], ResultT]", command: str = "pull") -> "ResultT":
    """Pull or push and show progress on terminals."""
    from localllm.front.models import PullMeter

    meter = PullMeter()
    with resumable(name, command) as status:
        return work(lambda state: status.show(meter.text(state, monotonic())))


@contextlib.contextmanager
def resumable(name: str, command: str) -> "Iterator[StatusLine]":
    """A line for progress. Ctrl-C ends the command, which resumes what it left."""
    with StatusLine() as status:
        try:
            yield status
        except KeyboardInterrupt:
            status.clear()
            note(f"Stopped. `localllm {command} {name}` resumes it.")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
