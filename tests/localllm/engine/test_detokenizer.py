"""Streamed text compared with cutting the whole text, for stop strings that overlap themselves and each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.stream import Detokenizer

letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3, unique=True)


@given(st.lists(st.text("abé", max_size=4), max_size=15), stops)
def test_the_text_is_cut_before_the_first_stop_string(pieces: list[str], stop: list[str]) -> None:
    detokenizer, shown, whole = Detokenizer(stop), "", ""
    for piece in pieces:
        before = detokenizer.stopped
        shown += detokenizer.push(piece.encode())
        whole += piece
        if detokenizer.stopped:
            break
        assert before is None
        held = whole[len(shown) :]
        assert whole.startswith(shown) and detokenizer.held == len(held)
        assert not held or any(text.startswith(held) for text in stop)
        assert not any(whole.endswith(text[:size]) for text in stop for size in range(len(held) + 1, len(text)))
    shown += detokenizer.flush()
    found = sorted((whole.find(text), text) for text in stop if text in whole)
    assert (shown, detokenizer.stopped) == ((whole[: found[0][0]], found[0][1]) if found else (whole, None))


def test_characters_wait_for_their_last_byte() -> None:
    detokenizer = Detokenizer(["é!"])
    assert [detokenizer.push(bytes([byte])) for byte in "aé".encode()] == ["a", "", ""]
    assert detokenizer.push(b"?") == "é?"
    assert detokenizer.push(b"\xc3\xc3") + detokenizer.flush() == "\ufffd"  # the first is invalid, the second cut


@pytest.mark.parametrize("text", ["é", "€", "👍", "👍🏽", "あ"])
def test_a_character_that_the_end_cuts_is_left_out(text: str) -> None:
    whole = f"so {text}".encode()
    for cut in range(3, len(whole) + 1):
        detokenizer = Detokenizer(["never"])
        shown = "".join(detokenizer.push(whole[at : at + 1]) for at in range(cut)) + detokenizer.flush()
        assert shown == whole[:cut].decode(errors="ignore")


@given(st.lists(st.sampled_from(["a", " ", "\t", "\n", "  b", "\n\n"]), max_size=20), st.integers(1, 4), st.data())
def test_a_shallow_line_is_cut_however_the_text_arrives(pieces: list[str], least: int, data: st.DataObject) -> None:
    """The text before the line break of the first later line with a character and less indentation."""
    text = "".join(pieces)
    wanted, at = text, text.find("\n")
    while at >= 0:
        line = text[at + 1 :].split("\n")[0]
        if line.strip(" \t") and len(line) - len(line.lstrip(" \t")) < least:
            wanted = text[:at]
            break
        at = text.find("\n", at + 1)
    detokenizer, shown, rest = Detokenizer(least_indent=least), "", text
    while rest and detokenizer.stopped is None:
        size = data.draw(st.integers(1, len(rest)))
        shown, rest = shown + detokenizer.push(rest[:size].encode()), rest[size:]
    assert shown + detokenizer.flush() == wanted
    assert (detokenizer.stopped is None) == (wanted == text)
