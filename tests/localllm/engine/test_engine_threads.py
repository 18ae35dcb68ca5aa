"""Many concurrent clients in threads and tasks, some of whom leave early."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localllm.engine import engine as engine_module
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.engine.stream import GenerationStream, fold, joined
from localllm.errors import EngineStoppedError
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.waiting import eventually

PROMPTS = [
    tuple(int(token) for token in np.random.default_rng(seed % 4).integers(1, 64, 20 + seed)) for seed in range(12)
]


def request(number: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0)
    return GenerationRequest(PROMPTS[number % len(PROMPTS)], sampling, max_tokens=5 + number % 20)


def test_threads_and_tasks_get_their_answers(tmp_path: Path) -> None:
    runner = FakeRunner(pages=60)
    engine = Engine(runner, FakeVocabulary(), max_running=4, disk=DiskCache(tmp_path, "fake", 2**20))
    engine.start()

    def client(number: int) -> None:
        stream = engine.submit(request(number))
        if number % 5 == 0:
            stream.cancel()
        done = stream.collect()
        engine.stats()
        check(number, done.token_ids, done.last.finish_reason)

    async def task(number: int) -> None:
        tokens: list[int] = []
        reason = None
        async for event in engine.submit(request(number)):
            tokens += event.token_ids
            reason = event.finish_reason
            if number % 7 == 0:
                return
        check(number, tuple(tokens), reason)

    def check(number: int, tokens: tuple[int, ...], reason: FinishReason | None) -> None:
        history = list(request(number).prompt)
        for token in tokens:
            assert token == int(runner.logits_after(history).argmax())
            history.append(token)
        assert reason is FinishReason.CANCELLED or len(tokens) == request(number).max_tokens

    async def tasks() -> None:
        await asyncio.gather(*map(task, range(30)))

    with ThreadPoolExecutor(9) as pool:
        futures = [pool.submit(client, number) for number in range(100)]
        futures.append(pool.submit(asyncio.run, tasks()))
        for future in futures:
            future.result()
    engine.close()
    assert runner.closed and runner.batches and max(runner.batches) > 1


def test_the_texts_of_a_step_wake_a_loop_once() -> None:
    engine = Engine(FakeRunner(pages=200), FakeVocabulary())
    rung: list[int] = []

    async def read(stream: GenerationStream) -> int:
        return sum([len(event.token_ids) async for event in stream])

    async def scene() -> list[int]:
        loop = asyncio.get_running_loop()
        ring = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *given: (rung.append(1), ring(*given))[1]  # type: ignore[method-assign]
        sampling = SamplingParams(temperature=0)
        streams = [engine.submit(GenerationRequest(prompt, sampling, max_tokens=30)) for prompt in PROMPTS[:6]]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        while engine.step():
            for _ in range(4):
                await asyncio.sleep(0)
        return await asyncio.gather(*readers)

    assert asyncio.run(scene()) == [30] * 6
    # Progress, texts and last events wake it apart.
    assert 30 <= len(rung) < 60
    engine.close()


def test_a_reader_who_is_behind_gets_the_text_as_one_event() -> None:
    engine = Engine(FakeRunner(), FakeVocabulary())
    plain = engine.submit(request(15))
    told = engine.submit(replace(request(16), sampling=SamplingParams(temperature=0, logprobs=1), prompt_logprobs=0))
    while engine.step():
        pass
    for stream in (plain, told):
        events = stream.poll()
        found = joined(events)
        assert fold(iter(found)) == fold(iter(events))
        text = [event for event in found if event.text and event.finish_reason is None]
        assert len(text) == (1 if stream is plain else len(events) - 2)
    engine.close()


def test_a_runner_that_fails_while_an_answer_ends_leaves_no_reader_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("the device is lost")

    runner = FakeRunner()
    monkeypatch.setattr(runner, "free_sequence", fail)
    engine = Engine(runner, FakeVocabulary())
    engine.start()
    stream = engine.submit(replace(request(0), background=True))  # its sequence is freed when it ends
    events = []

    def ended() -> bool:
        events.extend(stream.poll())
        return bool(events and events[-1].finish_reason)

    eventually(ended, "the reader waits forever")
    assert events[-1].finish_reason is FinishReason.ERROR and "the device is lost" in str(events[-1].error)
    engine.close()


def test_an_idle_engine_checks_its_bookkeeping(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "IDLE_S", 0.01)
    checks: list[bool] = []
    sound, broken = FakeRunner(), FakeRunner()
    check_pages = sound.check_integrity
    monkeypatch.setattr(sound, "check_integrity", lambda alive: checks.append(check_pages(alive) is None))
    broken.create_sequence()  # which belongs neither to a generation nor to the cache
    engine, failing = Engine(sound, FakeVocabulary()), Engine(broken, FakeVocabulary())
    engine.start()
    others = set(threading.enumerate())
    failing.start()
    for each in (engine, failing):
        assert len(each.submit(request(0)).collect().token_ids) == 5
    eventually(lambda: checks, "nothing was checked")
    assert engine.submit(request(0)).collect().last.counts.cached_memory > 0
    eventually(lambda: "sequences alive" in caplog.text, "a lost sequence was not found")
    eventually(lambda: set(threading.enumerate()) <= others, "the engine that failed has not stopped")
    with pytest.raises(EngineStoppedError, match="sequences alive"):
        failing.submit(request(1))
    for each in (engine, failing):
        each.close()
