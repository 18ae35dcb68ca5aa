"""The content of last events: log-probabilities with their text, why an answer failed, what limits a prompt."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine.disk_cache import SEGMENT_TOKENS, DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.step_costs import ChunkSize
from localllm.errors import ContextOverflowError, OutOfMemoryError
from tests.fakes.fake_runner import EOG, FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

PROMPT = (9, 9, 9)
# Tokens 1 to 5 spell "I am small."; 6 and 7 are the two bytes of "é".
PIECES = {1: b"I", 2: b" am", 3: b" sm", 4: b"all", 5: b".", 6: "é".encode()[:1], 7: "é".encode()[1:], EOG: b"<end>"}


def runner_that_says(*tokens: int) -> FakeRunner:
    def bias(history: list[int], row: NDArray[np.float32]) -> None:
        row[(*tokens, EOG)[min(len(history) - len(PROMPT), len(tokens))]] += 100

    return FakeRunner(bias=bias)


@pytest.mark.parametrize(
    ("said", "stop", "text", "told"),
    [
        ((1, 2, 3, 4, 5), (), "I am small.", (1, 2, 3, 4, 5)),  # the end token has no text
        ((1, 2, 3, 4, 5), ("small",), "I am ", (1, 2, 3)),  # a token cut by the stop string is reported
        ((1, 2, 3, 4, 5), ("all",), "I am sm", (1, 2, 3)),
        ((1, 2, 3, 4, 5), (" small.",), "I am", (1, 2)),  # one held back by the stop string is not
        ((1, 6, 7, 5), ("é",), "I", (1,)),
        ((1, 6, 7, 5), (), "Ié.", (1, 6, 7, 5)),
        ((1, 6), (), "I", (1, 6)),  # an incomplete character is no text
    ],
)
def test_log_probabilities_are_those_of_the_text(
    said: tuple[int, ...], stop: tuple[str, ...], text: str, told: tuple[int, ...]
) -> None:
    engine = Engine(runner_that_says(*said), FakeVocabulary(PIECES))
    sampling = SamplingParams(temperature=0, logprobs=1)
    stream = engine.submit(GenerationRequest(PROMPT, sampling=sampling, stop=stop, max_tokens=20))
    shown, entries = "", []
    while engine.step():
        for event in stream.poll():
            shown += event.text
            entries += [entry.token_id for entry in event.logprobs]
            assert len(entries) <= len(said) and entries == list(said[: len(entries)])
    assert (shown, tuple(entries)) == (text, told)


def test_the_reason_for_a_failure_is_reported() -> None:
    def no_room(_: list[int], __: NDArray[np.float32]) -> None:
        raise OutOfMemoryError("no room")

    engine = Engine(FakeRunner(bias=no_room), FakeVocabulary())
    stream = engine.submit(GenerationRequest(PROMPT))
    while engine.step():
        pass
    assert isinstance(stream.collect().last.cause, OutOfMemoryError)


@pytest.mark.parametrize(
    ("pages", "of_engine", "of_request", "holds", "remedy"),
    [
        (64, 40, None, 40, "--ctx"),
        (64, 40, 30, 30, "num_ctx"),
        (64, 40, 50, 40, "--ctx"),
        (6, 40, None, 20, "kv_mib"),
    ],
)
def test_the_error_for_a_long_prompt_names_the_limit(
    pages: int, of_engine: int, of_request: int | None, holds: int, remedy: str
) -> None:
    engine = Engine(FakeRunner(pages=pages), FakeVocabulary(), context_limit=of_engine)
    with pytest.raises(ContextOverflowError, match=f"60 tokens and the context holds {holds}.*{remedy}"):
        engine.submit(GenerationRequest((5,) * 60, context_limit=of_request))


class CopyingRunner(FakeRunner):
    """Counts the segments exported for the disk."""

    copied = 0

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        self.copied += 1
        return super().export_kv(sequence, start, stop)


def test_a_chat_goes_to_the_disk_while_a_long_prompt_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkSize, "_rows_in", lambda *_: 300)
    runner = CopyingRunner(pages=2000, max_rows=300)
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, runner.info.kv_layout, 2**20))
    streams = [engine.submit(GenerationRequest(prompt, max_tokens=1)) for prompt in ((5,) * 500, (7,) * 2000)]
    while not any(event.finish_reason for event in streams[0].poll()):
        engine.step()
    while not any(event.finish_reason for event in streams[1].poll()):
        engine.step()
    assert runner.copied == -(-499 // SEGMENT_TOKENS)
    engine.close()
