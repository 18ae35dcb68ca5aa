"""The random work of test_engine_random on the real runners, whose greedy answers are computed again afterwards."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from gguf_io import open_model
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, GenerationRequest
from localllm.engine.stream import GenerationStream, fold
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.localllm.engine.real_runners import KINDS, WatchedRunner, greedy_check, open_real
from tests.localllm.engine.test_engine_random import EngineMachine

# Memory for a few of the machine's requests, so that they crowd each other out.
TOKENS = 256


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_work_changes_no_answer(kind: str, data_dir: Path) -> None:
    with (
        open_model(data_dir / "models" / "gguf" / "stories260K-F32.gguf") as model,
        greedy_check(kind, model) as is_greedy,
    ):

        class RealMachine(EngineMachine):
            def start(self) -> None:
                self.runner = WatchedRunner(open_real(kind, model, tokens=TOKENS))  # type: ignore[assignment]
                cache = None
                if self.disk:
                    cache = DiskCache(Path(self.folder.name), self.runner.kv_identity, 1_000_000)
                self.engine = Engine(self.runner, FakeVocabulary(), max_running=4, max_waiting=6, disk=cache)

            def check(self, request: GenerationRequest, stream: GenerationStream) -> None:
                done = fold(iter(stream.poll()))
                assert done.last.finish_reason, "the stream never ended"
                if request.sampling.temperature == 0:
                    is_greedy(request.prompt, done.token_ids)
                if done.last.finish_reason is FinishReason.LENGTH:
                    assert len(done.token_ids) == min(request.max_tokens or 0, TOKENS - 1 - len(request.prompt))
                elif done.last.finish_reason is FinishReason.ERROR:
                    assert request.background
                self.past.append([*request.prompt, *done.token_ids])

        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            RealMachine,
            settings=settings(
                max_examples=12,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
