"""Encoded pictures: each content once, in memory and on disk, apart for users; damaged and foreign files."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.errors import PictureError
from gguf_io.image_rows import ImageRows, SeenPicture, SeenPieces, grid_of, row_ids
from gguf_io.media import SoundView
from gguf_io.pictures import Budget, Picture
from localllm import image_reader
from localllm.engine.runner import Projector
from localllm.image_reader import ImageReader
from models.vision.projector import NativeProjector
from tests.gguf_io.test_sounds import wav
from tests.picture_files import png, png_of
from tests.projector_files import write_projector
from tests.waiting import PATIENCE_S

TALL = np.zeros((8, 4, 3), np.uint8)


class Counting:
    """A projector that makes rows of a picture's mean colour, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def see(self, picture: Picture, content: bytes, budget: Budget) -> SeenPicture:
        self.calls += 1
        rows = np.full((6, 5), picture.pixels.mean(), np.float32) + np.arange(5, dtype=np.float32) / 3
        pieces = "<a>", ImageRows(row_ids(content, 1, 6), rows, True, grid_of(2, 3)), (7,)
        return SeenPicture(pieces, (budget.most_tokens or 30, 20), (1, 2))

    def tokens(self, size: tuple[int, int], budget: Budget) -> int:
        return 6

    sound_rate = 8_000

    def sound_tokens(self, samples: int) -> int:
        return samples // 100

    def hear(self, samples: np.ndarray, content: bytes) -> SeenPieces:
        self.calls += 1
        count = self.sound_tokens(len(samples))
        return "<s>", ImageRows(row_ids(content, 0, count), np.tile(samples[:5], (count, 1)), False), (7,)


def reader(folder: Path | None, projector: Projector, identity: str = "encoder") -> ImageReader:
    return ImageReader(projector, lambda: identity, lambda text: [ord(each) for each in text], folder)


def test_a_picture_is_encoded_once_in_any_encoding(tmp_path: Path) -> None:
    projector = Counting()
    images = reader(None, projector)
    first = images.see(png(1))
    assert images.see(png(1)) is first
    again = images.see(png(1) + b"more bytes after the end")
    assert again is first and projector.calls == 1
    assert first.pieces[0] == (60, 97, 62) and first.pieces[2] == (7,)
    assert images.see(png(2)) is not first and projector.calls == 2
    turned = images.see(png_of(TALL)), images.see(png_of(TALL.transpose(1, 0, 2)))  # the same bytes of pixels
    assert turned[0].pieces[1] is not turned[1].pieces[1]
    assert not list(tmp_path.iterdir())


def test_pictures_are_found_on_disk_after_a_restart_bit_by_bit(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    made = reader(tmp_path / "images", first).see(png(1))
    found = reader(tmp_path / "images", second).see(png(1))
    assert (first.calls, second.calls) == (1, 0)
    assert made.view == found.view and (made.view.resized, made.view.tiles, made.view.tokens) == ((30, 20), (1, 2), 10)
    assert (made.pieces[0], made.pieces[2]) == (found.pieces[0], found.pieces[2])
    one, other = made.pieces[1], found.pieces[1]
    assert isinstance(one, ImageRows) and isinstance(other, ImageRows)
    assert one.ids == other.ids and one.sees_all is other.sees_all
    np.testing.assert_array_equal(one.embeddings, other.embeddings)
    np.testing.assert_array_equal(one.positions(9, 0, 6), other.positions(9, 0, 6))
    assert one.length == other.length == 3


def test_a_sound_is_encoded_once_in_any_file_and_found_on_disk(tmp_path: Path) -> None:
    tone = np.sin(np.arange(800) / 5)
    projector = Counting()
    images = reader(tmp_path, projector)
    assert (images.tokens(wav(tone, rate=8_000)), projector.calls) == (8, 0)
    first = images.see(wav(tone, rate=8_000))
    assert images.see(wav(tone, rate=8_000) + b"after the end", Budget(most_tokens=3)) is first and projector.calls == 1
    assert images.see(wav(-tone, rate=8_000)) is not first and projector.calls == 2
    assert first.view == SoundView(0.1, 12)
    found = reader(tmp_path, projector).see(wav(tone, rate=8_000))
    assert (found.view, projector.calls) == (first.view, 2)
    one, other = first.pieces[1], found.pieces[1]
    assert isinstance(one, ImageRows) and isinstance(other, ImageRows)
    np.testing.assert_array_equal(one.embeddings, other.embeddings)
    with pytest.raises(PictureError):
        images.see(wav(tone)[:-1])


class Slow(Counting):
    """A projector that encodes when it is let, and notes whether two threads are in it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let = threading.Event(), threading.Event()
        self.inside = self.most_inside = 0

    def see(self, picture: Picture, content: bytes, budget: Budget) -> SeenPicture:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.entered.set()
        assert self.let.wait(PATIENCE_S)
        self.inside -= 1
        return super().see(picture, content, budget)


def test_threads_encode_one_after_the_other_and_the_same_picture_once() -> None:
    projector = Slow()
    images = reader(None, projector)
    with ThreadPoolExecutor(6) as threads:
        found = [threads.submit(images.see, png(seed)) for seed in (1, 2, 3, 1, 2, 3)]
        assert projector.entered.wait(PATIENCE_S)
        projector.let.set()
        pictures = [one.result(PATIENCE_S) for one in found]
    assert (projector.calls, projector.most_inside) == (3, 1)
    assert all(one is other for one, other in zip(pictures[:3], pictures[3:], strict=True))


def test_two_threads_get_the_rows_that_each_gets_alone(tmp_path: Path) -> None:
    files = [png(seed, 60 + seed, 40) for seed in range(8)]
    with open_model(write_projector(tmp_path / "p.gguf", "qwen3vl_merger")) as file:
        projector = NativeProjector(file, threads=2, context=512)
    alone, together = reader(None, projector), reader(None, projector)
    expected = [alone.see(file).pieces[1] for file in files]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda file: together.see(file).pieces[1], files))
    projector.close()
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, ImageRows) and isinstance(other, ImageRows)
        np.testing.assert_array_equal(one.embeddings, other.embeddings)


def test_closing_waits_for_the_running_picture_and_refuses_others() -> None:
    projector = Slow()
    images = reader(None, projector)
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(images.see, png(1))
        assert projector.entered.wait(PATIENCE_S)
        closing = threads.submit(images.close)
        assert not closing.done()
        projector.let.set()
        assert running.result(PATIENCE_S).view.tokens == 10
        closing.result(PATIENCE_S)
    with pytest.raises(PictureError, match="being unloaded"):
        images.see(png(2))
    assert images.see(png(1)).view.tokens == 10  # which is known


@pytest.mark.parametrize(("identity", "namespace"), [("another encoder", ""), ("encoder", "another user")])
def test_encoders_and_users_share_nothing(identity: str, namespace: str, tmp_path: Path) -> None:
    projector = Counting()
    (_, one, _), _ = reader(tmp_path, projector).see(png(1))
    (_, other, _), _ = reader(tmp_path, projector, identity).see(png(1), namespace=namespace)
    assert projector.calls == 2
    assert isinstance(one, ImageRows) and isinstance(other, ImageRows) and one.ids[0] != other.ids[0]


def test_token_counts_need_no_encoding() -> None:
    projector = Counting()
    images = reader(None, projector)
    assert (images.tokens(png(1)), projector.calls) == (6, 0)
    images.see(png(1))
    assert (images.tokens(png(1)), projector.calls) == (10, 1)  # with the marks around it


def test_another_budget_is_another_picture(tmp_path: Path) -> None:
    projector = Counting()
    images = reader(tmp_path, projector)
    small, usual = images.see(png(1), Budget(most_tokens=7)), images.see(png(1))
    assert (small.view.resized, usual.view.resized, projector.calls) == ((7, 20), (30, 20), 2)
    assert images.see(png(1), Budget(most_tokens=7)) is small
    assert reader(tmp_path, projector).see(png(1), Budget(None, 7)).view == small.view and projector.calls == 2


@pytest.mark.parametrize("change", ["cut", "flipped", "empty", "of another"])
def test_a_damaged_file_is_encoded_again(change: str, tmp_path: Path) -> None:
    projector = Counting()
    reader(tmp_path, projector).see(png(1))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if change == "of another":
        reader(tmp_path, projector).see(png(2))
        (other,) = set(tmp_path.iterdir()) - {path}
        data = bytearray(other.read_bytes())
    elif change == "flipped":
        data[len(data) // 2] ^= 4
    path.write_bytes(data[:-3] if change == "cut" else b"" if change == "empty" else data)
    calls = projector.calls
    assert isinstance(reader(tmp_path, projector).see(png(1)).pieces[1], ImageRows)
    assert projector.calls == calls + 1
    reader(tmp_path, projector).see(png(1))
    assert projector.calls == calls + 1  # it was written again


def test_the_oldest_go_beyond_the_limits_and_other_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    projector = Counting()
    images = reader(tmp_path, projector)
    images.see(png(0))
    size = next(path.stat().st_size for path in tmp_path.glob("*.image"))
    monkeypatch.setattr(image_reader, "DISK_BYTES", 3 * size + 10)
    monkeypatch.setattr(image_reader, "KEPT_BYTES", 300)
    for seed in range(1, 6):
        images.see(png(seed))
    assert len(list(tmp_path.glob("*.image"))) == 3
    assert (tmp_path / "notes.txt").read_text() == "mine"
    calls = projector.calls
    images.see(png(5))
    images.see(png(0))
    assert projector.calls == calls + 1


def test_no_picture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PictureError):
        reader(tmp_path, Counting()).see(b"no picture")
