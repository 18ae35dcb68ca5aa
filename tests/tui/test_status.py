"""The status line: its content and order, and what is dropped on narrow terminals."""

import pytest

from localllm.answer.event import AnswerEvent
from localllm.chats.parameters import NAMES, Parameters
from localllm.engine.request import Counts, Progress, Timings
from localllm.errors import RequestError
from localllm.settings import Settings
from tui.status import SpeedMeter, Status, bar


def a_status() -> Status:
    return Status(
        model="qwen3:0.6b",
        place="llama.cpp, 20/29 layers on GPU",
        context=4096,
        counts=Counts(prompt=100, cached_memory=30, cached_disk=60, generated=28),
        timings=Timings(ttft_s=0.34),
        memory=3 * 2**30,
        speed=41.6,
    )


def test_all_facts_where_there_is_room() -> None:
    assert str(a_status().line(200)) == (
        "qwen3:0.6b │ llama.cpp, 20/29 layers on GPU │ ctx 128/4096 ──────── │ cached 30 in memory, 60 on disk"
        " │ TTFT 340 ms │ 42 tok/s │ 3 GiB"
    )


def test_the_least_important_give_way_first() -> None:
    shown = [str(a_status().line(width)) for width in (160, 120, 80, 40)]
    assert [" GiB" in line for line in shown] == [True, False, False, False]
    assert ["layers on GPU" in line for line in shown] == [True, True, True, False]
    assert all("ctx 128/4096" in line for line in shown)
    assert all(len(line) <= width for line, width in zip(shown, (160, 120, 80, 40), strict=True))


def test_a_load_tells_what_and_how_far() -> None:
    status = Status(activity=("pulling qwen3:0.6b, 499 MiB, 12 MiB/s, 30 s left", 0.25))
    assert str(status.line(80)) == "━━────── 25% pulling qwen3:0.6b, 499 MiB, 12 MiB/s, 30 s left"


def test_a_prompt_that_is_read_tells_how_long_it_takes() -> None:
    status = Status(answering=True, progress=Progress(0, 1024, 4096), counts=Counts(cached_memory=512))
    assert status.segments()[0][1] == "reading ━━────── 1024/4096"
    status.timings = Timings(prefill_s=2.0)  # 512 tokens in 2 s: 3072 take 12
    assert status.segments()[0][1] == "reading ━━────── 1024/4096, 12 s left"
    status.progress = Progress(3, 0, 4096)
    assert status.segments()[0][1] == "queued, place 3"


def test_an_answer_that_stalls_shows_no_speed() -> None:
    status = Status(answering=True, speed=50.0, counts=Counts(generated=9))
    assert [text for _, text, _ in status.segments()] == ["writing", "50 tok/s"]
    status.silent_s = 12.0
    assert [text for _, text, _ in status.segments()] == ["no data for 12 s, Esc stops"]
    status.counts = Counts()
    assert [text for _, text, _ in status.segments()] == ["no token yet for 12 s, Esc stops"]


def test_names_from_elsewhere_cannot_act_on_the_terminal() -> None:
    assert "\x1b" not in str(Status(model="evil\x1b[2J", place="\x9b").line(80))


def test_a_context_that_is_nearly_full_warns() -> None:
    styles = {share: Status(context=100, counts=Counts(prompt=share)).segments()[0][2] for share in (50, 85, 97)}
    assert styles == {50: "$foreground 60%", 85: "$warning", 97: "$error"}


def test_dropped_messages_are_reported() -> None:
    assert "2 messages left out" in str(Status(counts=Counts(dropped_messages=2)).line(80))


def test_speed_is_that_of_the_last_seconds() -> None:
    meter = SpeedMeter()
    speeds = [
        meter.observe(AnswerEvent(counts=Counts(generated=tokens), timings=Timings(decode_s=seconds)))
        for tokens, seconds in ((1, 0.0), (11, 1.0), (21, 2.0), (121, 4.0), (321, 6.0))
    ]
    assert speeds[:3] == [0.0, 10.0, 10.0]
    assert speeds[-1] == 100.0  # 200 tokens in the last 2 s


def test_small_things() -> None:
    assert bar(0.5, 4) == "━━──"
    assert bar(0.375, 4) == "━╾──"
    assert bar(7.0, 4) == "━━━━"


def test_another_models_defaults_replace_unchanged_ones() -> None:
    old = Parameters()
    chosen = old.with_text("temperature", "0.2", old)
    new = Parameters.from_settings(Settings(temperature=0.6, top_k=20))
    rebased = chosen.rebased(old, new)
    assert (rebased.temperature, rebased.top_k) == (0.2, 20)


def test_a_misspelt_parameter_gets_a_suggestion() -> None:
    with pytest.raises(RequestError, match=r"no parameter 'presense_penalty'. Did you mean presence_penalty\?"):
        Parameters().with_text("presense_penalty", "1", Parameters())
    with pytest.raises(RequestError, match=r"no parameter 'colour'. There are: system, temperature, .*mirostat_eta"):
        Parameters().with_text("colour", "1", Parameters())


@pytest.mark.parametrize(
    "settings", [Settings(top_k=-1, max_tokens=0), Settings(temperature=30, repeat_penalty=50, ctx=8, seed=2**40)]
)
def test_what_settings_may_say_the_panel_keeps(settings: Settings) -> None:
    given = Parameters.from_settings(settings)
    kept = Parameters()
    for name in NAMES:
        kept = kept.with_text(name, given.text(name), Parameters())
    assert kept == given == Parameters.from_stored(given.stored(), Parameters())
