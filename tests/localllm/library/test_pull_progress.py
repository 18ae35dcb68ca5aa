import pytest

from localllm.cli.pull import Meter, human_time
from localllm.library.pull import PullStatus


def test_speed_and_time_left_are_of_the_last_seconds() -> None:
    meter, total = Meter(), 100 << 20
    assert meter.text(PullStatus("pulling manifest"), 0.0) == "pulling manifest"
    assert meter.text(PullStatus("pulling", None, 0, total), 1.0) == "pulling: 0% of 100 MiB"
    told = meter.text(PullStatus("pulling", None, 20 << 20, total), 3.0)
    assert told == "pulling: 20% of 100 MiB, 10 MiB/s, 8 s left"
    for second in range(4, 10):  # a stall
        told = meter.text(PullStatus("pulling", None, 20 << 20, total), float(second))
    assert told == "pulling: 20% of 100 MiB"


def test_what_was_there_before_is_no_speed() -> None:
    meter = Meter()
    meter.text(PullStatus("pulling", None, 50 << 20, 100 << 20), 0.0)
    assert "5 MiB/s, 9 s left" in meter.text(PullStatus("pulling", None, 55 << 20, 100 << 20), 1.0)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")])
def test_times_have_two_units_at_most(seconds: float, text: str) -> None:
    assert human_time(seconds) == text
