"""Files that people write: their encodings, and why one cannot be read."""

import codecs
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.actions.approvals import Approvals
from localllm.chats.saved import folder_of, read_persona, read_prompt
from localllm.errors import RequestError, SettingsError
from localllm.files import decoded, file_problem, listed, read_text
from localllm.front.prompt import read_format
from localllm.server.keys import read_keys
from localllm.settings import load_settings
from localllm.wings.agents.recording import RecordedRequest
from localllm.wings.lab.simulate.machines import from_bench
from localllm.wings.lab.workload.texts import read_prompts
from localllm.wings.tools.mcp_servers import read_servers
from tests.closed_folders import closed
from tests.systems import use_own_places
from tui.attachments import find_attachments
from tui.start import load_keys

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16"]


@pytest.mark.parametrize("encoding", [*ENCODINGS, "utf-16-le", "utf-16-be"])
def test_marks_and_line_ends_are_not_part_of_a_text(encoding: str) -> None:
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}.get(encoding, b"")
    assert decoded(mark + "Müller\r\nand\n\tsons\r".encode(encoding)) == "Müller\nand\n\tsons\r"
    assert decoded(b"") == ""
    assert decoded("in\ufeffside".encode()) == "in\ufeffside"


def machine(path: Path) -> str:
    with pytest.raises(RequestError) as refused:
        from_bench(path, 1.0)
    return str(refused.value).removeprefix(str(path))


def prompt_and_persona(path: Path) -> object:
    for kind, ending in (("prompt", "md"), ("persona", "toml")):
        folder_of(kind).mkdir(parents=True, exist_ok=True)
        (folder_of(kind) / f"x.{ending}").write_bytes(path.read_bytes())
    return read_prompt("x"), read_persona("x").values


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("temperature = 0.5\r\nseed = 3\r\n", lambda path: load_settings({}, {}, path)),
    ("k1\r\n", lambda path: read_keys(None, str(path))),
    ("# users\r\nann: k1\r\nbob: k2\r\n", lambda path: read_keys(None, str(path))),
    ('{"type": "object",\r\n"properties": {}}', lambda path: read_format(str(path))),
    ('{"mcpServers": {"a": {"command": "ä"}}}\r\n', read_servers),
    ('{"/": ["edit_file *"]}\r\n', lambda path: Approvals(Path("/"), path).rules),
    ('{"path": "/v1/messages",\r\n"body": {"system": "ä"}}', RecordedRequest.read),
    ("One prompt.\r\nAnother.\r\n", read_prompts),
    ('{"runs": []}\r\n', machine),
    ('find = "f7"\r\n', load_keys),
    ('system = "Be\\nkind."\r\n', prompt_and_persona),
    ("line one\r\nline two\r\n", lambda path: find_attachments(f"@{path}", len, lambda _: 0)[0].text),
    ("ü\r\n", read_text),
]


@pytest.mark.parametrize(("text", "read"), READERS, ids=[text[:20] for text, _ in READERS])
def test_one_meaning_in_every_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, read: Callable[[Path], object]
) -> None:
    use_own_places(tmp_path, monkeypatch)
    path = tmp_path / "file"
    found = []
    for encoding in ENCODINGS:
        for written in (text, text.replace("\r\n", "\n")):
            path.write_bytes(written.encode(encoding))
            found.append(repr(read(path)))
    assert set(found) == {found[0]}
    assert "ufeff" not in found[0]
    assert "\\r" not in found[0]


@pytest.mark.parametrize(
    "read", [read for _, read in READERS if read not in (machine, prompt_and_persona)], ids=lambda read: ""
)
def test_content_that_is_not_text_is_reported(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b'x = "M\xfcller"')
    with pytest.raises((RequestError, SettingsError), match=r"latin: is not UTF-8 text \(byte 6\)"):
        read(path)


def test_missing_and_closed_files(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    assert read_text(path, missing="nothing") == "nothing"
    assert (read_servers(path), load_keys(path), Approvals(tmp_path, path).rules) == ({}, {}, [])
    with pytest.raises(SettingsError, match=r"the key: .*file: cannot be read: .+\. Check the path"):
        read_text(path, SettingsError, what="the key: ")
    path.parent.mkdir()
    path.write_text(json.dumps({}))
    assert file_problem(path) == ""
    assert file_problem(path.parent) == "it is a folder"
    assert file_problem(tmp_path / "x") == "there is no such file"
    assert "null" in file_problem(tmp_path / "x\0y")
    with closed(path.parent):
        assert "Permission denied" in file_problem(path)
        with pytest.raises(SettingsError, match="Permission denied"):
            read_text(path, SettingsError, missing="nothing")
        errors: list[OSError] = []
        assert listed(path.parent, errors.append) == []
        assert [error.strerror for error in errors] == ["Permission denied"]
