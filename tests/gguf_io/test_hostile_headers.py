"""Handcrafted files of every kind that has crashed a GGUF reader: each gives one clear error, with little memory."""

import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from gguf_io import header, open_model
from gguf_io.errors import ModelFileError
from tests.gguf_io.handmade import ARRAY, BOOL, F32, STRING, U32, array, gguf_file, key, string, tensor, text, u32
from tests.systems import needs_named_pipes

HUGE = 2**64 - 1
FOUR = tensor("a", [4])  # 16 bytes of F32 at offset 0

HOSTILE = {
    "empty": (b"", "it is empty"),
    "magic alone": (b"GGUF", "ends after 4 bytes"),
    "other magic": (b"ggjx" + bytes(60), "not a GGUF file: it starts with 67 67 6a 78"),
    "zip": (b"PK\3\4" + bytes(60), "not a GGUF file"),
    "version 0": (gguf_file(version=0), "version: GGUF 0 is not supported"),
    "version 1": (gguf_file(version=1), "version: GGUF 1 is not supported"),
    "version 4": (gguf_file(version=4), "version: GGUF 4 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "key count over cap": (gguf_file(key_count=HUGE), "key count: is 18446744073709551615"),
    "key count past the end": (gguf_file([u32("a", 1)], key_count=60_000), "key count: runs past the end"),
    "one key too many": (gguf_file([u32("a", 1)], key_count=2), r"key 1.*"),
    "tensor count over cap": (gguf_file(tensor_count=HUGE), "tensor count: is 18446744073709551615"),
    "tensor count past the end": (gguf_file(tensor_count=60_000), "tensor count: runs past the end"),
    "tensor table cut": (gguf_file(tensors=[FOUR])[:50], "tensor 'a'.*: runs past the end"),
    "key length": (gguf_file([string("a", 2**40)]), "key 0: has 1099511627776 bytes"),
    "key past the end": (gguf_file([string("a", 1000)]), "key 0: runs past the end"),
    "key empty": (gguf_file([u32("", 1)]), "key 0: is ''"),
    "key with nul": (gguf_file([u32("general.name\0x", 1)]), "key 0: .*not a printable name"),
    "key not UTF-8": (gguf_file([key(b"\xff\xfe", U32, bytes(4))]), "key 0: is not UTF-8"),
    "key twice": (gguf_file([u32("a.b", 1), u32("a.b", 2)]), "a.b: occurs twice"),
    "value type": (gguf_file([key("a.b", 13, bytes(8))]), "a.b: has the unknown value type 13"),
    "value cut": (gguf_file([key("a.b", U32, b"\1")])[:41], "a.b: runs past the end"),
    "string over cap": (gguf_file([key("a.b", STRING, string("x", HUGE))]), "a.b: has 18446744073709551615 bytes"),
    "string past the end": (gguf_file([key("a.b", STRING, string("x", 2**20))]), "a.b: runs past the end"),
    "string not UTF-8": (gguf_file([text("a.b", b"\xc3\x28")]), "a.b: is not UTF-8"),
    "array over cap": (gguf_file([array("a.b", U32, 2**62)]), r"a.b \(length\): is 4611686018427387904"),
    "array past the end": (gguf_file([array("a.b", U32, 2**20)]), "a.b.*: runs past the end"),
    "array whose size overflows 64 bits": (gguf_file([array("a.b", 12, 2**61)]), r"a.b \(length\): is"),
    "array item type": (gguf_file([array("a.b", 99, 1, bytes(8))]), "a.b: has the unknown item type 99"),
    "array of arrays": (gguf_file([array("a.b", ARRAY, 1, struct.pack("<IQ", 4, 0))]), "a.b: is an array of arrays"),
    "arrays 10,000 deep": (
        gguf_file([key("a.b", ARRAY, struct.pack("<IQ", ARRAY, 1) * 10_000)]),
        "a.b: is an array of arrays",
    ),
    "array string over cap": (gguf_file([array("a.b", STRING, 2, string("x") + string("", HUGE))]), r"a.b\[1\]: has"),
    "array string past the end": (
        gguf_file([array("a.b", STRING, 1, string("x", 2**16))]),
        "a.b: runs past the end",
    ),
    "array of strings cut": (gguf_file([array("a.b", STRING, 50, string("x"))]) + bytes(60), r"a.b\[\d+\]: runs past"),
    "alignment 0": (gguf_file([u32("general.alignment", 0)]), "general.alignment: is 0"),
    "alignment 1": (gguf_file([u32("general.alignment", 1)]), "general.alignment: is 1"),
    "alignment 24": (gguf_file([u32("general.alignment", 24)]), "general.alignment: is 24"),
    "alignment 2**31": (gguf_file([u32("general.alignment", 2**31)]), "general.alignment: is 2147483648"),
    "alignment as text": (gguf_file([text("general.alignment", "32")]), "general.alignment: must be an integer"),
    "alignment as truth": (gguf_file([key("general.alignment", BOOL, b"\1")]), "general.alignment: must be an int"),
    "alignment as float": (gguf_file([key("general.alignment", F32, bytes(4))]), "general.alignment: must be an int"),
    "tensor name empty": (gguf_file(tensors=[tensor("", [4])], data=bytes(16)), "not a printable name"),
    "tensor name with nul": (gguf_file(tensors=[tensor("a\0b", [4])], data=bytes(16)), "not a printable name"),
    "tensor name with escape": (gguf_file(tensors=[tensor("\x1b[2J", [4])], data=bytes(16)), "not a printable name"),
    "tensor name too long": (gguf_file(tensors=[tensor("a" * 65, [4])], data=bytes(16)), "has 65 bytes"),
    "tensor twice": (gguf_file(tensors=[FOUR, tensor("a", [4], offset=32)], data=bytes(64)), "'a': occurs twice"),
    "no dimension": (gguf_file(tensors=[tensor("a", [])], data=bytes(16)), "'a': has 0 dimensions"),
    "five dimensions": (gguf_file(tensors=[tensor("a", [1] * 5)], data=bytes(16)), "'a': has 5 dimensions"),
    "2**32-1 dimensions": (
        gguf_file(tensors=[string("a") + b"\xff" * 4], data=bytes(64)),
        "'a': has 4294967295 dimensions",
    ),
    "empty dimension": (gguf_file(tensors=[tensor("a", [4, 0])], data=bytes(16)), "'a': has an empty dimension"),
    "dimensions that overflow to 0": (gguf_file(tensors=[tensor("a", [2**32] * 2)], data=bytes(64)), "'a': ends at"),
    "dimension 2**64-1": (gguf_file(tensors=[tensor("a", [HUGE])], data=bytes(64)), "'a': ends at byte"),
    "block type unknown": (gguf_file(tensors=[tensor("a", [4], 4242)], data=bytes(16)), "the block type 4242"),
    "block type withdrawn": (gguf_file(tensors=[tensor("a", [32], 31)], data=bytes(64)), "the block type 31"),
    "row is no multiple of its blocks": (gguf_file(tensors=[tensor("a", [33, 32], 8)], data=bytes(2048)), "33 values"),
    "offset past the end": (gguf_file(tensors=[tensor("a", [4], offset=64)], data=bytes(32)), "'a': ends at byte"),
    "offset that overflows": (gguf_file(tensors=[tensor("a", [4], offset=HUGE - 31)], data=bytes(32)), "'a': ends at"),
    "offset unaligned": (gguf_file(tensors=[tensor("a", [4], offset=4)], data=bytes(64)), "not aligned to 32"),
    "data cut": (gguf_file(tensors=[FOUR], data=bytes(15)), "'a': ends at byte"),
    "overlap": (gguf_file(tensors=[tensor("a", [16]), tensor("b", [4], offset=32)], data=bytes(96)), "'b': overlaps"),
    "same offset": (gguf_file(tensors=[tensor("a", [4]), tensor("b", [4])], data=bytes(96)), "overlaps tensor"),
    "split count": (gguf_file([u32("split.count", 2**31)]), "split.count: is 2147483648"),
    "split with another name": (gguf_file([u32("split.count", 2)]), "split.count: the model has 2 parts"),
    "array text not UTF-8": (
        gguf_file([array("a.b", STRING, 2, string("x") + string(b"\xff"))]),
        r"a.b\[1\]: is not UTF",
    ),
}


def read_everything(path: Path) -> None:
    with open_model(path) as model:
        for value in model.metadata.values():
            if not isinstance(value, str | int | float):
                list(value)
        for name in model.tensors:
            model.data(name).sum()


@pytest.mark.parametrize("kind", HOSTILE)
def test_one_error_that_names_file_and_field(kind: str, tmp_path: Path) -> None:
    content, field = HOSTILE[kind]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=f"hostile.gguf: .*{field}"):
        read_everything(path)


def test_hostile_counts_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    for content, _ in HOSTILE.values():
        path.write_bytes(content)
        tracemalloc.start()
        try:
            with pytest.raises(ModelFileError):
                read_everything(path)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = gguf_file(
        [text("general.architecture", "llama"), array("a.tokens", STRING, 2, string("x") + string("yz"))],
        [FOUR],
        bytes(16),
    )
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            open_model(path)
    path.write_bytes(whole)
    open_model(path).close()


LAST_VALUES = {
    "a number": (u32("a.last", 7), 7),
    "a text": (text("a.last", "end"), "end"),
    "an empty text": (text("a.last", ""), ""),
    "numbers": (array("a.last", U32, 2, struct.pack("<II", 5, 6)), [5, 6]),
    "no numbers": (array("a.last", U32, 0), []),
    "texts": (array("a.last", STRING, 2, string("x") + string("yz")), ["x", "yz"]),
    "an empty text of several": (array("a.last", STRING, 2, string("x") + string("")), ["x", ""]),
    "texts longer than what is read at once": (
        array("a.last", STRING, 300, string("x" * 1000) * 300),
        ["x" * 1000] * 300,
    ),
}


@pytest.mark.parametrize("kind", LAST_VALUES)
def test_a_header_may_end_with_the_file(kind: str, tmp_path: Path) -> None:
    last, expected = LAST_VALUES[kind]
    architecture = text("general.architecture", "llama")
    path = tmp_path / "short.gguf"
    path.write_bytes(gguf_file([architecture, last])[: 24 + len(architecture) + len(last)])
    with open_model(path) as model:
        value = model.metadata["a.last"]
        assert (value if isinstance(value, str | int | float) else list(value)) == expected


@pytest.mark.parametrize("at_once", [1, 24, 100])
def test_texts_are_whole_however_much_is_read_at_once(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "READ_AT_ONCE", at_once)
    words = ["x" * (number % 23) for number in range(200)]
    path = tmp_path / "texts.gguf"
    texts = array("a.b", STRING, len(words), b"".join(map(string, words)))
    path.write_bytes(gguf_file([text("general.architecture", "llama"), texts]))
    with open_model(path) as model:
        assert list(model.metadata["a.b"]) == words  # type: ignore[arg-type]


def test_header_over_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.gguf"
    path.write_bytes(gguf_file([text("a", "x" * 200)]))
    open_model(path).close()
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ModelFileError, match="limit of 100 bytes for a header"):
        open_model(path)


def test_the_handmade_file_is_otherwise_sound(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    path.write_bytes(gguf_file([u32("general.alignment", 64)], [FOUR], struct.pack("<4f", 1, 2, 3, 4), alignment=64))
    with open_model(path) as model:
        assert model.dequantize("a").tolist() == [1, 2, 3, 4]


@needs_named_pipes
def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", tmp_path, Path("/dev/zero")):
        with pytest.raises(ModelFileError, match=r"not a regular file|is a folder"):
            open_model(path)
    for path in (tmp_path / "absent.gguf", tmp_path / "nul\0.gguf", tmp_path / ("x" * 5000)):
        with pytest.raises(ModelFileError, match="cannot be opened"):
            open_model(path)
