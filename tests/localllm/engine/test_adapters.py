"""LoRA adapters per request: which prefixes are shared, and what is stored on disk."""

from pathlib import Path

import pytest

from gguf_io.model_file import FileState
from gguf_io.runner_info import AdapterSet
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.sequence import adapter_set
from localllm.engine.stream import Completion
from localllm.errors import RequestError, SettingsError
from localllm.placement.loaded_model import load_model
from localllm.settings import Settings, lora_text, parse_lora
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.gpu_offload import lora_files
from tests.oracle import llama_oracle
from tests.waiting import PATIENCE_S

GREEDY = SamplingParams(temperature=0)
ONE: AdapterSet = ((0, 1.0),)
BOTH: AdapterSet = ((0, 0.5), (1, 2.0))
PROMPT = tuple(range(1, 60)) * 2


def test_the_setting_names_files_and_weights() -> None:
    assert parse_lora("") == []
    assert parse_lora("a.gguf, b.gguf:0.5,C:\\x.gguf,d:-2") == [
        (Path("a.gguf"), 1.0),
        (Path("b.gguf"), 0.5),
        (Path("C:\\x.gguf"), 1.0),
        (Path("d"), -2.0),
    ]
    for bad in (":0.5", "a:1e9", "a:nan"):
        with pytest.raises(SettingsError, match="FILE or FILE:WEIGHT"):
            parse_lora(bad)


def test_paths_with_commas_and_colons_are_one_adapter_each() -> None:
    paths = [Path("/models/a, b/x:1.5"), Path("/y:z.gguf"), Path("/plain.gguf")]
    assert parse_lora(lora_text(paths)) == [(path, 1.0) for path in paths]
    assert parse_lora("/a\\,b.gguf:0.5, c") == [(Path("/a,b.gguf"), 0.5), (Path("c"), 1.0)]


def test_a_request_may_choose_what_is_loaded() -> None:
    assert adapter_set([(1, 2.0), (0, 0.5)], 2) == BOTH
    assert adapter_set([(0, 0.0)], 1) == ()
    for bad in ([(2, 1.0)], [(-1, 1.0)], [(0, 1.0), (0, 2.0)], [(0, float("nan"))]):
        with pytest.raises(RequestError):
            adapter_set(bad, 2)
    with pytest.raises(RequestError, match="--lora"):
        adapter_set(ONE, 0)


def ask(engine: Engine, adapters: AdapterSet | None, tokens: tuple[int, ...] = PROMPT) -> Completion:
    stream = engine.submit(GenerationRequest(tokens, GREEDY, max_tokens=5, ignore_eos=True, adapters=adapters))
    while engine.step():
        engine.check_integrity()
    return stream.collect()


def expected(runner: FakeRunner, adapters: AdapterSet, tokens: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    history = list(tokens)
    for _ in range(5):
        history.append(int(runner.logits_after(history, adapters).argmax()))
    return tuple(history[len(tokens) :])


def test_prefixes_are_shared_under_the_same_adapters_alone() -> None:
    runner = FakeRunner(pages=400, adapter_files=((), ()))
    engine = Engine(runner, FakeVocabulary(), adapters=ONE)
    for adapters, meant, reused in (
        (None, ONE, 0),
        ((), (), 0),
        (BOTH, BOTH, 0),
        (ONE, ONE, len(PROMPT) - 1),
        (BOTH, BOTH, len(PROMPT) - 1),
        (((1, 2.0), (0, 0.5)), BOTH, len(PROMPT) - 1),
        ((), (), len(PROMPT) - 1),
    ):
        done = ask(engine, adapters)
        assert done.token_ids == expected(runner, meant)
        assert done.last.counts.cached_memory == reused
    assert len({expected(runner, adapters) for adapters in ((), ONE, BOTH)}) == 3
    with pytest.raises(RequestError, match="There is no adapter 2"):
        ask(engine, ((2, 1.0),))
    engine.check_integrity()


def test_neighbours_of_other_adapters_do_not_wait_for_each_other() -> None:
    runner = FakeRunner(pages=400, adapter_files=((), ()))
    engine = Engine(runner, FakeVocabulary())
    sets: list[AdapterSet] = [(), ONE, (), BOTH, ONE]
    streams = [
        engine.submit(GenerationRequest(PROMPT, GREEDY, max_tokens=5, ignore_eos=True, adapters=adapters))
        for adapters in sets
    ]
    while engine.step():
        engine.check_integrity()
    for adapters, stream in zip(sets, streams, strict=True):
        assert stream.collect().token_ids == expected(runner, adapters)


def stored(path: Path, content: bytes) -> tuple[FileState, ...]:
    """The state of a new file."""
    path.write_bytes(content)
    with path.open("rb") as file:
        return (FileState.of(path, file.fileno()),)


def test_each_set_of_adapters_has_a_separate_folder(tmp_path: Path) -> None:
    first, second, moved = (
        stored(tmp_path / name, content) for name, content in (("a", b"one"), ("b", b"two"), ("c", b"one"))
    )
    asked: list[tuple[tuple[tuple[FileState, ...], ...], AdapterSet, bool]] = [
        ((first, second), (), False),
        ((first, second), ONE, False),
        ((first, second), BOTH, False),
        ((first, second), ((1, 1.0),), False),
        ((moved, second), ONE, True),
        ((second, moved), ((1, 1.0),), True),
        ((first,), ((0, 0.5),), False),
        ((first, second), BOTH, True),
        ((), (), True),
    ]
    for files, chosen, known in asked:
        runner = FakeRunner(pages=400, adapter_files=files)
        engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path / "kv", "fake", 2**26))
        ask(engine, chosen, PROMPT[::-1])  # starts the digest of the adapters
        for disk in engine.kv.disks.values():
            disk.digest.wait(PATIENCE_S)
        done = ask(engine, chosen)
        assert done.last.counts.cached_disk > 0 if known else done.last.counts.cached_disk == 0
        engine.close()


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("backend", ["llama", "native"])
def test_a_model_loaded_with_adapters_answers_as_the_merged_one(backend: str, data_dir: Path, tmp_path: Path) -> None:
    path = data_dir / "models/gguf/stories260K-F32.gguf"
    made = lora_files.factors(path, 3)
    adapter = lora_files.write(tmp_path / "adapter.gguf", made)
    lora_files.merge(path, tmp_path / "merged.gguf", (made, 0.5))
    settings = Settings(lora=f"{adapter}:0.5", backend=backend, ctx=256, threads=1, disk_cache=False)
    with load_model(path, settings) as model:
        assert model.placement.name == ("llama.cpp" if backend == "llama" else "native")
        prompt = tuple(model.tokenizer.encode("Once upon a time"))
        answers = [
            model.engine.submit(GenerationRequest(prompt, GREEDY, max_tokens=12, adapters=adapters)).collect().token_ids
            for adapters in (None, (), ((0, 0.5),))
        ]
    merged, plain = (llama_oracle.greedy(name, list(prompt), 12) for name in (tmp_path / "merged.gguf", path))
    assert [list(answer) for answer in answers] == [merged, plain, merged]
    with pytest.raises(RequestError, match=r"absent\.gguf: adapter not found"):
        load_model(path, Settings(lora=str(tmp_path / "absent.gguf")))
