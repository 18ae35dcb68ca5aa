"""Many clients in threads and tasks at once, some of whom leave early."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

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
