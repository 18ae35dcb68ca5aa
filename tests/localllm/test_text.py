"""Text for people, and foreign text made safe."""

import pytest

from localllm.text import (
    columns_of,
    harmless,
    human_bytes,
    human_count,
    human_seconds,
    human_time,
    nearest,
    shortened,
    table,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1023 * 1024, "0.999 MiB"), (3 * 2**40, "3 TiB")],
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (260032, "260 K"), (999_999, "1 M"), (1_100_048_384, "1.1 B"), (2 * 10**15, "2e+03 T")],
)
def test_counts_for_people(count: int, text: str) -> None:
    assert human_count(count) == text


def test_columns_count_what_a_terminal_shows() -> None:
    assert columns_of("model") == 5
    assert columns_of("模型") == 4
    assert columns_of("e\u0301") == 1  # a separate combining accent
    rows = [("NAME", "SIZE"), ("模型", "1"), ("other", "2")]
    assert table(rows) == "NAME   SIZE\n模型   1\nother  2\n"
    assert table([("a", "1"), ("bb", "22")], right=[1]) == "a    1\nbb  22\n"


def test_what_acts_on_a_terminal_or_reorders_text_is_replaced() -> None:
    assert harmless("a\x1b[2J\u202eb\u2066c\t\n") == "a\ufffd[2J\ufffdb\ufffdc\t\n"
    assert harmless("\u200f\u05d0 \u200d") == "\u200f\u05d0 \u200d"  # marks used in right-to-left text


def test_quoted_text_has_a_bound() -> None:
    assert shortened("x" * 15_000_000) == "x" * 80 + "…"
    assert shortened("x" * 80) == "x" * 80


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")])
def test_times_have_two_units_at_most(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


def test_short_times_have_three_digits() -> None:
    assert [human_seconds(seconds) for seconds in (1.25, 0.34, 0.0042)] == ["1.25 s", "340 ms", "4.2 ms"]


def test_the_nearest_name_is_found_by_the_beginning() -> None:
    known = ("temperature", "top_k")
    assert nearest("temprature", known) == "temperature"
    assert nearest("temperature" * 20, ["temperature" * 20]) == "temperature" * 20
    assert nearest("zzz", known) is None
    assert nearest("x" * 50_000_000, known) is None  # of any length
