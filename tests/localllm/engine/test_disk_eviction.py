"""Which segments the disk tier evicts first at its limit: never those that others depend on."""

import os
from pathlib import Path

import pytest

from localllm.engine.disk_cache import SEGMENT_TOKENS, DiskCache
from localllm.engine.disk_eviction import ROOT, StoredFile, first_to_go, pinned
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

LONG = tuple((at * 7) % 63 + 1 for at in range(5 * SEGMENT_TOKENS))


def cached(folder: Path, prompt: tuple[int, ...], limit: int) -> int:
    """Tokens that a new process finds on disk for a prompt, which it then stores too."""
    runner = FakeRunner(pages=1000, max_rows=256)
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(folder, runner.info.kv_layout, limit))
    stream = engine.submit(GenerationRequest(prompt, sampling=SamplingParams(temperature=0), max_tokens=1))
    while engine.step():
        pass
    engine.close()
    return stream.collect().last.counts.cached_disk


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.kv"))


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_of_a_conversation_beyond_the_limit_the_beginning_stays(tmp_path: Path, kept: int) -> None:
    assert cached(tmp_path / "measured", LONG[: kept * SEGMENT_TOKENS], 2**20) == 0
    limit = stored(tmp_path / "measured") + 100
    for found in (0, kept * SEGMENT_TOKENS, kept * SEGMENT_TOKENS):
        assert cached(tmp_path / "bounded", LONG, limit) == found
        assert 0 < stored(tmp_path / "bounded") <= limit


def test_what_conversations_share_goes_last(tmp_path: Path) -> None:
    shared = LONG[:SEGMENT_TOKENS]
    older, newer = ((*shared, *((token,) * SEGMENT_TOKENS)) for token in (5, 6))
    cached(tmp_path, older, 2**20)
    cached(tmp_path, newer, 2**20)
    limit = stored(tmp_path) - 1
    cached(tmp_path, (9,) * 64, limit)  # writes too little to need more than one segment's space
    assert cached(tmp_path, older, limit) == SEGMENT_TOKENS
    assert cached(tmp_path, newer, limit) >= SEGMENT_TOKENS


def test_what_nothing_leads_to_goes_first(tmp_path: Path) -> None:
    cached(tmp_path, LONG[: 3 * SEGMENT_TOKENS], 2**20)
    (first,) = tmp_path.glob("*/0000*.kv")
    first.unlink()
    for path in tmp_path.glob("*/*.kv"):
        os.utime(path, (2**31, 2**31))  # used last, by their own timestamps
    other = LONG[1 : 1 + SEGMENT_TOKENS]
    cached(tmp_path, other, stored(tmp_path))
    assert cached(tmp_path, other, 2**20) == SEGMENT_TOKENS - 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_segments_that_lead_to_each_other_in_a_circle_go_first(tmp_path: Path, size: int) -> None:
    names = [f"{number:032x}" for number in range(1, 5)]
    circle = [f"{names[at]}.{names[(at + 1) % size]}.kv" for at in range(size)]
    healthy = [f"{ROOT}.{'a' * 32}.kv", f"{'a' * 32}.{'b' * 32}.kv"]
    files = [StoredFile(tmp_path / name, 10, 1) for name in healthy]
    files += [StoredFile(tmp_path / name, 10, 2**40) for name in circle]  # used last
    order = [path.name for _, path in first_to_go(files, set())]
    assert set(order[:size]) == set(circle)
    assert order[size:] == healthy[::-1]


def segments(folder: Path, *pairs: str, used: int = 1) -> list[StoredFile]:
    """Segments of 10 bytes, each named by the letters of what is before it and of its end; 0 is the beginning."""
    names = {"0": ROOT} | {letter: letter * 32 for letter in "abcdef"}
    return [StoredFile(folder / f"{names[pair[0]]}.{names[pair[1]]}.kv", 10, used) for pair in pairs]


def ends(paths: list[Path] | set[Path]) -> str:
    return "".join(path.name.split(".")[1][0] for path in paths)


def shared_prefix(folder: Path, letter: str) -> Path:
    return folder / f"{letter * 32}.trunk"


def test_kept_segments_go_last_whatever_was_used_before(tmp_path: Path) -> None:
    old, new = segments(tmp_path, "0a", "ab"), segments(tmp_path, "0c", used=9)
    assert ends([path for _, path in first_to_go([*old, *new])]) == "bac"
    kept = {file.path for file in old}
    assert ends([path for _, path in first_to_go([*old, *new], kept)]) == "cba"
    assert ends([path for _, path in first_to_go([*old, *new], {new[0].path}, kept)]) == "cba"
    assert ends([path for _, path in first_to_go([*old, *new], kept, {new[0].path})]) == "bac"


def test_a_parent_stays_as_long_as_what_follows_it(tmp_path: Path) -> None:
    files = [*segments(tmp_path, "0a"), *segments(tmp_path, "ab", used=9), *segments(tmp_path, "0c", used=5)]
    assert ends([path for _, path in first_to_go(files)]) == "cba"


@pytest.mark.parametrize(
    ("most", "found"), [(9, ""), (10, "a"), (19, "a"), (20, "ab"), (29, "ab"), (30, "abd"), (99, "abd")]
)
def test_shared_prefixes_are_pinned_from_their_beginnings_up_to_the_limit(
    tmp_path: Path, most: int, found: str
) -> None:
    """The second shared prefix shares its beginning with the first one, which counts once."""
    files = segments(tmp_path, "0a", "ab", "ad", "0c")
    shared = [shared_prefix(tmp_path, letter) for letter in "bd"]
    assert ends(sorted(pinned(files, shared, most))) == "".join(sorted(found))


def test_a_shared_prefix_whose_segments_form_a_circle_is_pinned_once(tmp_path: Path) -> None:
    files = segments(tmp_path, "ba", "ab")
    assert ends(sorted(pinned(files, [shared_prefix(tmp_path, "a")], 100))) in ("ab", "ba")
    assert pinned(files, [shared_prefix(tmp_path, "c")], 100) == set()
