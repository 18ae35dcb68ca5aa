"""What was drafted, and how long that took, in the last object of each protocol that tells times."""

from localllm.answer.event import AnswerEvent
from localllm.engine.request import Counts, FinishReason, Timings
from localllm.server.ollama.wire import final
from localllm.server.wire import timings

BY_MODEL = AnswerEvent(
    counts=Counts(prompt=9, generated=30, drafted=24, accepted=18),
    timings=Timings(decode_s=2.0, drafting_s=0.5),
    finish_reason=FinishReason.STOP,
)
BY_LOOKUP = AnswerEvent(counts=Counts(prompt=9, generated=30, drafted=24, accepted=18), timings=Timings(decode_s=2.0))
NOT_AT_ALL = AnswerEvent(counts=Counts(prompt=9, generated=30), timings=Timings(decode_s=2.0))


def drafts(told: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in told.items() if name.startswith("draft")}


def test_the_last_object_of_ollama() -> None:
    by_model, by_lookup, none = (drafts(final("m", {}, last, 3.0, 0.0)) for last in (BY_MODEL, BY_LOOKUP, NOT_AT_ALL))
    assert by_model == {"draft_count": 24, "draft_accepted_count": 18, "draft_duration": 500_000_000}
    assert by_lookup == {"draft_count": 24, "draft_accepted_count": 18}
    assert none == {}


def test_the_timings_of_llama_cpp() -> None:
    by_model, by_lookup, none = (drafts(timings(last)) for last in (BY_MODEL, BY_LOOKUP, NOT_AT_ALL))
    assert by_model == {"draft_n": 24, "draft_n_accepted": 18, "draft_ms": 500.0}
    assert by_lookup == {"draft_n": 24, "draft_n_accepted": 18}
    assert none == {}
