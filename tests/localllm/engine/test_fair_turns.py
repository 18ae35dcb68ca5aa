"""Fair queueing: no client waits for all requests of another."""

from collections.abc import Iterator

import pytest

from localllm.engine import scheduler
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.stream import GenerationStream
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = Engine(FakeRunner(pages=200), FakeVocabulary(), max_running=2, max_waiting=300)
    yield opened
    opened.close()


def submit(engine: Engine, first: int, client: str = "", max_tokens: int | None = 8) -> GenerationStream:
    greedy = SamplingParams(temperature=0)
    wanted = GenerationRequest((first, 2, 3), greedy, max_tokens, ignore_eos=True, client=client)
    return engine.submit(wanted)


def ended(stream: GenerationStream) -> bool:
    return any(event.finish_reason is not None for event in stream.poll())


def order_of_ends(engine: Engine, streams: dict[str, GenerationStream]) -> list[str]:
    left, order = dict(streams), []
    while engine.step():
        done = [name for name, stream in left.items() if ended(stream)]
        for name in done:
            del left[name]
        order += done
    assert not left
    return order


def test_a_request_does_not_wait_for_all_of_another_client_s(engine: Engine) -> None:
    streams = {f"greedy {index}": submit(engine, index % 5 + 1, "greedy") for index in range(40)}
    engine.step()
    streams |= {f"other {index}": submit(engine, index + 1, f"other {index}") for index in range(3)}
    order = order_of_ends(engine, streams)
    assert sorted(map(order.index, ("other 0", "other 1", "other 2")))[-1] < 8


def test_many_newcomers_do_not_keep_a_client_s_later_requests_waiting(engine: Engine) -> None:
    """Each newcomer's round is after that of the last admitted one."""
    streams = {f"greedy {index}": submit(engine, index % 5 + 1, "greedy") for index in range(6)}
    left = dict(streams)
    newcomers = 0
    while left:
        if len(engine.scheduler.waiting) < 8:
            newcomers += 1
            submit(engine, newcomers % 5 + 1, f"other {newcomers}")
        engine.step()
        left = {name: stream for name, stream in left.items() if not ended(stream)}
        assert newcomers < 60
    assert newcomers > 6


def test_clients_without_a_name_come_in_their_order(engine: Engine) -> None:
    streams = {str(index): submit(engine, index % 5 + 1) for index in range(12)}
    assert order_of_ends(engine, streams) == [str(index) for index in range(12)]


def test_answers_without_end_take_turns(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "TURN_S", 0.0)
    endless = [submit(engine, index + 1, f"endless {index}", 4000) for index in range(3)]
    short = submit(engine, 4, "short")
    for _ in range(200):
        engine.step()
        for stream in endless:
            assert not ended(stream)
        if ended(short):
            break
    else:
        pytest.fail("the short one never ran to its end")
