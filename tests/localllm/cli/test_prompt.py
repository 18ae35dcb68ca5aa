import io
import json
import sys
from pathlib import Path

import pytest

from localllm.errors import RequestError
from localllm.front.prompt import check_text, read_format, read_prompt
from tests.systems import make_terminal


def with_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    if terminal:
        make_terminal(stream, monkeypatch)
    monkeypatch.setattr("sys.stdin", stream)


def test_argument_alone_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with_stdin(monkeypatch, b"never read", terminal=True)
    assert read_prompt(" once\n", None) == " once\n"


def test_file_and_stdin_are_appended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes("zwei ä\n".encode())
    with_stdin(monkeypatch, b"three\n\n")
    assert read_prompt("one", tmp_path / "f") == "one\n\nzwei ä\n\nthree\n"
    with_stdin(monkeypatch, b"only\n")
    assert read_prompt(None, None) == "only"


def test_no_prompt_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for data, terminal in ((b"", False), (b"\n", False), (b"", True)):
        with_stdin(monkeypatch, data, terminal)
        with pytest.raises(RequestError, match="No prompt"):
            read_prompt(None, None)


def test_closed_stdin_is_not_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert read_prompt("one", None) == "one"


def test_sources_that_are_not_text_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_stdin(monkeypatch, b"ab\xff")
    if sys.platform == "win32":  # it is in the console's code page
        assert read_prompt("one", None).startswith("one\n\nab")
    else:
        with pytest.raises(RequestError, match=r"standard input: is not UTF-8 text \(byte 2\)"):
            read_prompt("one", None)
    with pytest.raises(RequestError, match="missing: cannot be read: No such file"):
        read_prompt(None, tmp_path / "missing")
    with pytest.raises(RequestError, match=r"not UTF-8 text \(character 1\)"):
        check_text("a\udcff")


def test_a_format_is_json_a_schema_or_a_file_with_one(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"ä": {"type": "integer"}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    assert read_format("json") == "json"
    assert read_format(f" {json.dumps(schema)}") == read_format(str(tmp_path / "schema.json")) == schema
    for wrong, told in (
        ('{"type"', "is not JSON: "),
        ('{"items":' * 500 + "{}" + "}" * 500, "nested deeper than 128 levels"),
        (str(tmp_path / "list.json"), "is not a JSON Schema"),
        (str(tmp_path / "missing"), "missing: cannot be read: No such file"),
    ):
        with pytest.raises(RequestError, match=told):
            read_format(wrong)
