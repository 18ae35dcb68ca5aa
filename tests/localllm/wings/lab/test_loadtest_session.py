"""Load tests against a server with known times, in virtual time."""

import asyncio
from typing import Any

import pytest

from localllm.errors import RequestError
from localllm.slo import Slo
from localllm.wings.lab.loadtest.report import as_data, charts, head, rows, sentences
from localllm.wings.lab.loadtest.server import LoadTarget
from localllm.wings.lab.loadtest.session import LoadTest, RequestSource, TrialPlan
from localllm.wings.lab.loadtest.trial import Bounds, ClosedLoop, Load, OpenLoop
from localllm.wings.lab.workload.requests import Block, Lengths, RequestShape, WorkloadRequest
from tests.localllm.wings.lab.virtual_time import TimedServer, now, run

TARGET = LoadTarget("http://server:1", None, None, raw=False, extra={})
FIVE = RequestShape(Lengths(20, 40), Lengths(5, 5)).requests  # 0.5 s, and four tokens 0.125 s apart: a second each


def session(*loads: Load, source: RequestSource | None = None, slo: Slo | None = None, **bounds: Any) -> LoadTest:
    """requests, duration_s, patience_s, connections: as in Bounds and Plan."""
    connections = bounds.pop("connections", 64)
    limits = Bounds(**{"requests": 8, "duration_s": 1e6, "patience_s": 1e5, **bounds})
    return LoadTest(
        TrialPlan(TARGET, loads, limits, connections, slo), source or RequestSource(FIVE, 1), lambda _: None
    )


def measure(session: LoadTest, server: TimedServer) -> LoadTest:
    async def main() -> None:
        session.clock, session.transport = now, server
        await session.run()

    run(main())
    return session


def test_one_client_sees_the_servers_own_times() -> None:
    done = measure(session(ClosedLoop(1)), TimedServer())
    assert done.alone is not None
    assert (done.alone.ttft, done.alone.tpot, done.alone.e2e) == pytest.approx((0.5, 0.125, 1.0))
    summary = done.trials[0].summary(None)
    for found, expected in ((summary.ttft, 0.5), (summary.tpot, 0.125), (summary.itl, 0.125), (summary.e2e, 1.0)):
        assert found is not None
        assert (found.p50, found.p99, found.mean) == pytest.approx((expected,) * 3)
    assert (summary.answered, summary.generated_tokens, summary.counted) == (8, 40, True)
    assert summary.seconds == pytest.approx(8)
    assert (summary.request_rate, summary.token_rate) == pytest.approx((1, 5))


def test_clients_of_one_slot_take_turns() -> None:
    done = measure(session(ClosedLoop(2)), TimedServer())
    # Each waits for the other's second, except the first one.
    assert [outcome.ttft for outcome in done.trials[0].outcomes] == pytest.approx([0.5, *[1.5] * 7])


def test_two_slots_serve_two_clients_at_once() -> None:
    done = measure(session(ClosedLoop(2)), TimedServer(slots=2))
    assert done.trials[0].summary(None).seconds == pytest.approx(4)


def test_open_loop_queues_as_arrivals_say() -> None:
    done = measure(session(OpenLoop(1.5), requests=60), TimedServer())
    free, expected = 0.0, []
    for outcome in sorted(done.trials[0].outcomes, key=lambda one: one.due):
        begins = max(outcome.due, free)  # Lindley's recursion for one slot
        expected.append(begins - outcome.due + 0.5)
        free = begins + 1.0
    found = [outcome.ttft for outcome in sorted(done.trials[0].outcomes, key=lambda one: one.due)]
    assert found == pytest.approx(expected)
    assert max(found) > 5  # more arrive than can be served


def test_a_trace_keeps_the_times_it_recorded() -> None:
    trace = [WorkloadRequest(at, (Block(f"own {at}", 20),), 1) for at in (0.0, 0.25, 7.0)]
    done = measure(
        session(OpenLoop(None), source=RequestSource(lambda count, _: trace[:count], 0)), TimedServer(slots=9)
    )
    assert [outcome.due for outcome in done.trials[0].outcomes] == [0.0, 0.25, 7.0]
    assert done.trials[0].planned == 3


def test_waiting_for_a_connection_counts() -> None:
    done = measure(session(ClosedLoop(2), connections=1), TimedServer(slots=2))
    summary = done.trials[0].summary(None)
    assert summary.ttft is not None
    assert summary.ttft.p99 == pytest.approx(1.5)
    assert summary.late == pytest.approx(1.0)
    assert any("raise --connections" in line for line in sentences(done))


def test_goodput_counts_who_met_the_slo() -> None:
    done = measure(session(ClosedLoop(2), slo=Slo(ttft=1.0)), TimedServer())
    summary = done.trials[0].summary(done.plan.slo)
    assert (summary.good, summary.attained) == (1, 1 / 8)
    assert summary.goodput == pytest.approx(1 / 8)


def test_a_trial_stops_sending_when_its_time_is_up() -> None:
    done = measure(session(ClosedLoop(1), duration_s=3.5), TimedServer())
    assert len(done.trials[0].outcomes) == 4
    assert done.trials[0].note == "4 requests not sent in time"
    done = measure(session(OpenLoop(1), requests=100, duration_s=10), TimedServer(slots=100))
    assert 0 < len(done.trials[0].outcomes) < 30
    assert all(outcome.due < 10 for outcome in done.trials[0].outcomes)


def test_a_request_that_takes_too_long_is_given_up() -> None:
    # Two prompts are counted and two warm up, so the fifth is the trial's first.
    done = measure(session(ClosedLoop(1), patience_s=2.0, requests=2), TimedServer(hangs=4))
    first, second = done.trials[0].outcomes
    assert (first.e2e, second.e2e) == pytest.approx((2.0, 2.0))
    assert first.error == "no complete answer within 2 s"
    assert "1 client: 2 failed: no complete answer within 2 s." in sentences(done)


def test_cancelling_keeps_what_was_measured() -> None:
    stopped = session(ClosedLoop(2), slo=Slo(ttft=1))

    async def main() -> None:
        stopped.clock, stopped.transport = now, TimedServer()
        task = asyncio.create_task(stopped.run())
        while not stopped.trials:
            await asyncio.sleep(0.01)
        await asyncio.sleep(3.25)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    trial = stopped.trials[0]
    assert len(trial.outcomes) == 3
    assert (trial.complete, trial.running) == (False, 2)
    assert "stopped; 2 requests without a complete answer" in sentences(stopped)[2]
    assert as_data(stopped)["trials"][0]["answered"] == 3


def test_the_knee_is_where_the_queue_grows() -> None:
    server = TimedServer()
    found = measure(session(slo=Slo(ttft=3.0), requests=200), server)
    assert found.knee is not None
    assert found.knee.met is not None
    assert found.knee.missed is not None
    # A second each: one slot serves at most 1/s, and at 0.5/s hardly any request waits for three seconds.
    assert 0.5 < found.knee.met < found.knee.missed <= found.knee.met * 1.1
    assert found.knee.missed < 1.3
    by_rate = {trial.load.rate: trial.summary(found.plan.slo).attained for trial in found.trials}  # type: ignore[union-attr]
    assert by_rate[found.knee.met] >= 0.9 > by_rate[found.knee.missed]  # type: ignore[operator]
    assert any(line.startswith("The knee: 90% of the requests met ttft=3s up to") for line in sentences(found))


@pytest.mark.parametrize(
    ("slo", "said"), [(Slo(ttft=0.4), "No tested rate met"), (Slo(ttft=1e9), "Every tested rate met")]
)
def test_a_search_without_a_knee_ends(slo: Slo, said: str) -> None:
    found = measure(session(slo=slo, requests=4), TimedServer())
    assert len(found.trials) == 14
    assert any(line.startswith(said) for line in sentences(found))


def test_prompts_have_the_wanted_tokens_and_new_text_in_each_trial() -> None:
    server = TimedServer()
    shape = RequestShape(Lengths(30, 30), Lengths(1, 1), shared=10, groups=1)
    done = measure(session(ClosedLoop(1), ClosedLoop(2), source=RequestSource(shape.requests, 1)), server)
    assert {outcome.prompt_tokens for trial in done.trials for outcome in trial.outcomes} == {30}
    texts = [body["messages"][0]["content"] for _, _, body in server.asked[4:]]
    assert len(set(texts)) == 16
    # The template adds three tokens, so 27 words make 30 tokens; ten of them are shared within a trial.
    prefixes = [" ".join(text.split()[:10]) for text in texts]
    assert len(set(prefixes[:8])) == len(set(prefixes[8:])) == 1
    assert prefixes[0] != prefixes[8]


def test_prompts_of_a_file_are_sent_in_their_order() -> None:
    server = TimedServer()
    source = RequestSource(FIVE, 0, [[{"role": "user", "content": name}] for name in "abc"])
    measure(session(ClosedLoop(1), source=source, requests=4), server)
    sent = [body["messages"][0]["content"] for _, _, body in server.asked]
    assert sent == list("ab" + "cabc")


def test_only_the_given_address_is_asked() -> None:
    server = TimedServer()
    measure(session(ClosedLoop(3)), server)
    assert {(url.host, url.port) for _, url, _ in server.asked} == {("server", 1)}


def test_a_server_that_refuses_cannot_be_measured() -> None:
    with pytest.raises(RequestError, match=r"http://server:1 refuses with 503: not today\."):
        measure(session(ClosedLoop(1)), TimedServer(status=503))


def test_a_server_that_counts_nothing() -> None:
    done = measure(session(ClosedLoop(1)), TimedServer(counts=False))
    said = "\n".join(sentences(done))
    assert "does not count prompt tokens" in said
    assert "does not count generated tokens; each piece" in said
    assert done.trials[0].summary(None).generated_tokens == 40


def test_the_report_of_one_trial() -> None:
    done = measure(session(ClosedLoop(1), slo=Slo(ttft=2, tpot=0.1)), TimedServer())
    assert head(done) == "timed at http://server:1 (openai); one request alone: TTFT 500 ms, TPOT 125 ms"
    assert rows(done.trials, done.plan.slo) == [
        ("MS", "P50", "P95", "P99", "MEAN"),
        ("TTFT", *["500"] * 4),
        ("ITL", *["125"] * 4),
        ("TPOT", *["125"] * 4),
        ("E2E", *["1000"] * 4),
    ]
    first, second, *_ = sentences(done)
    assert first.startswith("1 client: 8 of 8 requests answered in 8.0 s, 1.00 requests/s, 5.0 generated tokens/s")
    assert second == "Goodput at ttft=2s,tpot=0.1s: 0.00 requests/s (0% of the requests)."
    (chart, _) = charts(done.model, done.trials)
    assert chart.series[0].points[-1] == pytest.approx((100, 500))


def test_the_report_of_several_trials() -> None:
    done = measure(session(ClosedLoop(2), ClosedLoop(1), slo=Slo(ttft=1)), TimedServer())
    found = rows(done.trials, done.plan.slo)
    assert found[0][-2:] == ("GOODPUT/S", "SLO MET")
    assert [row[0] for row in found[1:]] == ["1 client", "2 clients"]
    assert found[1][-1] == "100%"
    assert [[x for x, _ in series.points] for series in charts(done.model, done.trials)[0].series] == [[1, 2]] * 3
    data = as_data(done)
    assert [trial["clients"] for trial in data["trials"]] == [2, 1]
    assert data["trials"][1]["ttft"]["p95"] == pytest.approx(0.5)
    assert data["trials"][1]["outcomes"][0]["met_slo"] is True
