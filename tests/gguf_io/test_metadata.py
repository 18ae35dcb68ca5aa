"""Metadata getters: each refusal names the file and the key. Round trips through gguf's writer."""

import math
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_io import open_model
from gguf_io.errors import ModelFileError
from gguf_io.metadata import Metadata, MetadataArray


def numbers(*values: int, code: str = "B") -> MetadataArray:
    return MetadataArray(bytes(values), len(values), code, "x.gguf: list")


@pytest.fixture
def metadata() -> Metadata:
    values = {
        "int": 7,
        "negative": -7,
        "float": 0.5,
        "nan": math.nan,
        "inf": math.inf,
        "str": "text",
        "bool": True,
        "list": numbers(1, 2, 3),
        "flags": numbers(1, 0, code="?"),
        "none": numbers(),
    }
    return Metadata(Path("x.gguf"), values)  # type: ignore[arg-type]


def test_getters_return_what_is_there(metadata: Metadata) -> None:
    assert metadata.get_int("int") == 7
    assert metadata.get_int("negative", minimum=-10) == -7
    assert metadata.get_float("float") == 0.5
    assert metadata.get_float("int") == 7.0
    assert metadata.get_str("str") == "text"
    assert metadata.get_bool("bool") is True
    assert metadata.get_list("list", int, length=3) == [1, 2, 3]
    assert metadata.get_list("flags", bool) == [True, False]
    assert metadata.get_list("none", str) == []


def test_defaults_stand_in_for_missing_keys_only(metadata: Metadata) -> None:
    assert metadata.get_int("absent", 0) == 0
    assert metadata.get_float("absent", 1e4) == 1e4
    assert metadata.get_str("absent", "") == ""
    assert metadata.get_bool("absent", False) is False
    assert metadata.get_int("int", 0) == 7


REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("get_int", ("absent",), {}, "absent: is missing"),
    ("get_int", ("str",), {}, r"str: must be an integer, not str \(text\)"),
    ("get_int", ("str", 3), {}, "str: must be an integer"),
    ("get_int", ("bool",), {}, "bool: must be an integer"),
    ("get_int", ("float",), {}, "float: must be an integer"),
    ("get_int", ("list",), {}, "list: must be an integer, not an array"),
    ("get_int", ("negative",), {}, "negative: is -7, outside 0.."),
    ("get_int", ("int",), {"minimum": 8}, "int: is 7, outside 8.."),
    ("get_int", ("int",), {"maximum": 6}, r"int: is 7, outside 0\.\.6"),
    ("get_float", ("absent",), {}, "absent: is missing"),
    ("get_float", ("nan",), {}, "nan: is nan, not a finite number"),
    ("get_float", ("inf",), {}, "inf: is inf, not a finite number"),
    ("get_float", ("bool",), {}, "bool: must be a number"),
    ("get_float", ("str",), {}, "str: must be a number"),
    ("get_float", ("float",), {"minimum": 1.0}, r"float: is 0.5, outside 1.0\.\.inf"),
    ("get_str", ("int",), {}, "int: must be a string"),
    ("get_bool", ("int",), {}, "int: must be true or false"),
    ("get_list", ("int", int), {}, "int: must be an array"),
    ("get_list", ("absent", int), {}, "absent: is missing"),
    ("get_list", ("list", str), {}, "list: must be an array of str, but contains int"),
    ("get_list", ("flags", int), {}, "flags: must be an array of int, but contains bool"),
    ("get_list", ("list", int), {"length": 4}, "list: must have 4 items, not 3"),
]


@pytest.mark.parametrize(("getter", "args", "kwargs", "message"), REFUSED)
def test_refusals_name_file_and_key(
    metadata: Metadata, getter: str, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=f"x.gguf: {message}"):
        getattr(metadata, getter)(*args, **kwargs)


def test_an_array_is_a_sequence() -> None:
    array = numbers(5, 6, 7)
    assert (len(array), array[0], array[-1], list(array[1:]), 6 in array) == (3, 5, 7, [6, 7], True)
    assert repr(array) == "<3 items of x.gguf: list>"
    with pytest.raises(IndexError):
        array[3]


RANGES = {
    GGUFValueType.UINT8: st.integers(0, 2**8 - 1),
    GGUFValueType.INT8: st.integers(-(2**7), 2**7 - 1),
    GGUFValueType.UINT16: st.integers(0, 2**16 - 1),
    GGUFValueType.INT16: st.integers(-(2**15), 2**15 - 1),
    GGUFValueType.UINT32: st.integers(0, 2**32 - 1),
    GGUFValueType.INT32: st.integers(-(2**31), 2**31 - 1),
    GGUFValueType.UINT64: st.integers(0, 2**64 - 1),
    GGUFValueType.INT64: st.integers(-(2**63), 2**63 - 1),
    GGUFValueType.FLOAT32: st.floats(width=32, allow_nan=False),
    GGUFValueType.FLOAT64: st.floats(allow_nan=False),
    GGUFValueType.BOOL: st.booleans(),
    GGUFValueType.STRING: st.text(max_size=40),
}
VALUES = st.sampled_from(list(RANGES)).flatmap(
    lambda kind: st.one_of(
        st.tuples(RANGES[kind], st.just(kind), st.none()),
        st.tuples(st.lists(RANGES[kind], min_size=1, max_size=20), st.just(GGUFValueType.ARRAY), st.just(kind)),
    )
)


@settings(max_examples=150)
@given(values=st.dictionaries(st.from_regex(r"[a-z_]{1,9}(\.[a-z0-9_]{1,9}){1,3}", fullmatch=True), VALUES, max_size=9))
def test_whatever_ggufs_writer_writes_is_read_back(values: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    values = {key: value for key, value in values.items() if not key.startswith(("general.", "split."))}
    path = tmp_path_factory.getbasetemp() / "round_trip.gguf"
    writer = GGUFWriter(path, "llama")
    for key, (value, kind, item_kind) in values.items():
        writer.add_key_value(key, value, kind, item_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with open_model(path) as model:
        read = {k: list(v) if isinstance(v, MetadataArray) else v for k, v in model.metadata.items()}
    assert read == {"general.architecture": "llama"} | {key: value for key, (value, _, _) in values.items()}
