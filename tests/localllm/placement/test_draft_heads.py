"""Models with a draft head in a separate file: the same answers, what plans count, and what is refused."""

from pathlib import Path

import pytest

from gguf_io import open_model
from localllm.engine.drafter import SelfDrafter
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.speculation import DraftLength
from localllm.errors import RequestError
from localllm.placement.backends import choose_backend, place
from localllm.placement.companions import draft_file, refuse_head_on_llama
from localllm.placement.loaded_model import load_model
from localllm.settings import Settings
from models.builtin import path as built_in
from models.native_runner import NativeRunner
from models.needs import native_needs
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.models.eagle_models import HEADS, TARGET, TRAINED, write_head
from tests.models.synthetic import write

PLAIN = Settings(backend="native", kv_mib=64, disk_cache=False, packed_mib=0, threads=2)
STORY = "<|im_start|>user\nTell me a story about {}.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft four tokens, whatever steps cost."""
    monkeypatch.setattr(DraftLength, "choose", lambda _self, limit, *_: max(min(limit, 4), 0))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", HEADS)
def test_answers_are_the_same_to_the_token(name: str, tmp_path: Path) -> None:
    model = write(TARGET, tmp_path / "model.gguf")
    head = write_head(HEADS[name], tmp_path / "head.gguf")
    prompts = [[(at * 13 + seed) % 290 + 3 for at in range(20 + 30 * seed)] for seed in range(5)]

    def answers(drafts: bool) -> list[tuple[int, ...]]:
        with open_model(model) as file, open_model(head) as opened:
            runner = NativeRunner(file, kv_bytes=64 << 20, threads=2, drafts=opened if drafts else False)
        assert runner.info.can_draft == drafts
        engine = Engine(runner, FakeVocabulary(), drafter=SelfDrafter(runner) if drafts else None)
        sampled = [SamplingParams(temperature=seed % 3 / 2, seed=5) for seed in range(5)]
        streams = [
            engine.submit(GenerationRequest(tuple(prompt), sampling, max_tokens=40, ignore_eos=True))
            for prompt, sampling in zip(prompts, sampled, strict=True)
        ]
        while engine.step():
            engine.check_integrity()
        done = [stream.collect() for stream in streams]
        engine.close()
        assert (sum(each.last.counts.drafted for each in done) > 100) == drafts
        return [each.token_ids for each in done]

    assert answers(drafts=True) == answers(drafts=False)


@pytest.mark.usefixtures("eager")
def test_a_trained_head_is_mostly_right_and_changes_nothing() -> None:
    with load_model(built_in(), PLAIN) as plain, load_model(built_in(), Settings(**with_head(TRAINED))) as drafting:
        drafted = accepted = 0
        for subject in ("a brave fox", "the moon", "a robot who is lonely", "two old friends"):
            ids = plain.tokenizer.encode(STORY.format(subject), parse_special=True)
            request = GenerationRequest(tuple(ids), SamplingParams(temperature=0), max_tokens=120)
            expected, done = (model.engine.submit(request).collect() for model in (plain, drafting))
            assert (done.token_ids, done.text) == (expected.token_ids, expected.text)
            drafted += done.last.counts.drafted
            accepted += done.last.counts.accepted
        assert drafted > 300 and accepted > drafted / 2


def with_head(head: Path) -> dict[str, object]:
    return {"backend": "native", "kv_mib": 64, "disk_cache": False, "packed_mib": 0, "threads": 2, "draft": str(head)}


def test_plans_count_what_a_head_takes(tmp_path: Path) -> None:
    model, head = write(TARGET, tmp_path / "model.gguf"), write_head(HEADS["own"], tmp_path / "head.gguf")
    with open_model(model) as file, open_model(head) as drafts:
        with_drafts, without = (native_needs(file, threads=2, drafts=one) for one in (drafts, False))
        size = sum(one.nbytes for one in drafts.tensors.values())
        assert 0.9 * size < with_drafts.weights - without.weights < 1.3 * size
        assert with_drafts.buffers > without.buffers
        assert (with_drafts.kv_per_token, with_drafts.row) == (without.kv_per_token, without.row)
        settings = Settings(backend="native", kv_mib=64, draft=str(head))
        with draft_file(settings.draft) as draft:
            placed = place(file, settings, draft=draft)
        assert placed.draft is None and placed.uses[0].other == 0
        assert placed.uses[0].weights == native_needs(file, drafts=drafts).weights


def test_a_draft_head_is_not_a_model() -> None:
    with open_model(TRAINED) as file, pytest.raises(RequestError, match="only drafts for the model that it was made"):
        choose_backend(file, PLAIN)


def test_heads_draft_on_the_native_engine_alone() -> None:
    settings = Settings(backend="llama", draft=str(TRAINED))
    with open_model(built_in()) as file, draft_file(settings.draft) as head:
        with pytest.raises(RequestError, match=r"there is a GPU\). Leave out --draft, or choose --backend native"):
            refuse_head_on_llama(head, "there is a GPU")
        with pytest.raises(RequestError, match="drafts on the native engine only"):
            choose_backend(file, settings, draft=head)


def test_a_head_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    model = write(TARGET, tmp_path / "model.gguf", tokens=[f"<{at}>" for at in range(320)])
    with pytest.raises(RequestError, match="its vocabulary differs"):
        load_model(model, Settings(**with_head(TRAINED)))
