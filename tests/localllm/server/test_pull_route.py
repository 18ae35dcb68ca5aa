"""The progress of a pull as lines, with a function in place of the registry."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from localllm.library.errors import PullError
from localllm.library.pull import PullStatus
from localllm.server.ollama.library import work_lines
from tests.waiting import PATIENCE_S

DIGEST = "sha256:" + "0" * 64
Progress = Callable[[PullStatus], None]


def lines_of(pull: Callable[[Progress], None]) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        return [json.loads(line) async for line in work_lines(pull)]

    return asyncio.run(read())


def test_progress_becomes_lines() -> None:
    def pull(progress: Progress) -> None:
        progress(PullStatus("pulling manifest"))
        for done in range(0, 101, 10):
            progress(PullStatus("pulling", DIGEST, done, 100))
        progress(PullStatus("success", completed=100, total=100))

    lines = lines_of(pull)
    assert lines[0] == {"status": "pulling manifest"} and lines[-1] == {"status": "success"}
    assert lines[-2] == {"status": "pulling", "digest": DIGEST, "total": 100, "completed": 100}


def test_a_failed_pull_raises_its_reason() -> None:
    def pull(_progress: Progress) -> None:
        raise PullError("no such model")

    with pytest.raises(PullError, match="no such model"):
        lines_of(pull)


def test_an_unread_pull_stops() -> None:
    ended = threading.Event()

    def pull(progress: Progress) -> None:
        try:
            for done in range(10**9):
                progress(PullStatus("pulling", DIGEST, done, 10**9))
                ended.wait(0.001)
        finally:
            ended.set()

    async def leave() -> None:
        lines = work_lines(pull)
        await anext(lines)
        await lines.aclose()

    asyncio.run(leave())
    assert ended.wait(PATIENCE_S)
