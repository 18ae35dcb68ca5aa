from localllm.front.models import PullMeter
from localllm.library.pull import PullStatus


def test_speed_and_time_left_are_of_the_last_seconds() -> None:
    meter, total = PullMeter(), 100 << 20
    assert meter.text(PullStatus("pulling manifest"), 0.0) == "pulling manifest"
    assert meter.text(PullStatus("pulling", None, 0, total), 1.0) == "pulling: 0% of 100 MiB"
    told = meter.text(PullStatus("pulling", None, 20 << 20, total), 3.0)
    assert told == "pulling: 20% of 100 MiB, 10 MiB/s, 8 s left"
    for second in range(4, 10):  # a stall
        told = meter.text(PullStatus("pulling", None, 20 << 20, total), float(second))
    assert told == "pulling: 20% of 100 MiB"


def test_earlier_downloads_do_not_count_as_speed() -> None:
    meter = PullMeter()
    meter.text(PullStatus("pulling", None, 50 << 20, 100 << 20), 0.0)
    assert "5 MiB/s, 9 s left" in meter.text(PullStatus("pulling", None, 55 << 20, 100 << 20), 1.0)
