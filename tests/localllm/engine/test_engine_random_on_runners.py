"""The random work of test_engine_random on the real runners; greedy answers are recomputed afterwards."""

from pathlib import Path

import pytest

from gguf_io import open_model
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.engine.stream import fold
from localllm.errors import ContextOverflowError, QueueFullError
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.localllm.engine.real_runners import KINDS, WatchedRunner, greedy_check, open_real
from tests.localllm.engine.test_engine_random import Request, Work, walk
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write

# Memory for a few of the requests, so that they evict each other.
TOKENS = 256
RUNS = 12
CACHED = {"reused_memory_tokens", "reused_disk_tokens", "evicted_tokens"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_work_changes_no_answer(kind: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = CACHED | {"accepted_tokens"} | ({"copies_bytes"} if kind == "llama" else set())
    work(kind, data_dir / "models" / "gguf" / "stories260K-F32.gguf", 1_000_000, expected, monkeypatch)


@pytest.mark.slow
def test_random_work_on_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with gated delta networks, whose few slots are evicted too."""
    path = write(MODELS["qwen35"], tmp_path / "qwen35.gguf")
    work("native", path, 8_000_000, CACHED, monkeypatch)  # drafts from random weights are never right


def work(kind: str, path: Path, disk_bytes: int, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do random work on a model, and check that everything expected has occurred."""
    with open_model(path) as model, greedy_check(kind, model) as is_greedy:

        class RealWork(Work):
            def start(self) -> None:
                self.runner = WatchedRunner(open_real(kind, model, tokens=TOKENS))  # type: ignore[assignment]
                cache = DiskCache(self.folder, self.runner.info.kv_layout, disk_bytes) if self.disk else None
                self.engine = Engine(self.runner, FakeVocabulary(), max_running=4, max_waiting=6, disk=cache)

            def submit(self) -> None:
                text = self.one_of(*self.past)
                request = GenerationRequest(
                    tuple(text[: self.one_of(1, 7, 20, 50, 90)]),
                    sampling=self.one_of(SamplingParams(temperature=0), SamplingParams(seed=7)),
                    max_tokens=self.one_of(0, 1, 9, 25),
                    priority=self.one_of(0, 0, 1),
                    background=bool(self.chance.random() < 0.15),
                )
                try:
                    self.asked.append(Request(request, self.engine.submit(request), TOKENS))
                except (QueueFullError, ContextOverflowError):
                    return

            def check(self) -> None:
                for asked in self.asked:
                    asked.read()
                    done = fold(iter(asked.events))
                    assert done.last.finish_reason, "the stream never ended"
                    if asked.request.sampling.temperature == 0:
                        is_greedy(asked.request.prompt, done.token_ids)
                    if done.last.finish_reason is FinishReason.LENGTH:
                        most = asked.request.max_tokens
                        assert len(done.token_ids) == min(most or 0, TOKENS - 1 - len(asked.request.prompt))
                    elif done.last.finish_reason is FinishReason.ERROR:
                        assert asked.request.background
                    self.past = [*self.past[-7:], [*asked.request.prompt, *done.token_ids]]
                self.asked.clear()

        walk(RealWork, RUNS, monkeypatch, expected)
