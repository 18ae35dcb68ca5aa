"""400 kB of worst-case text for each parser of foreign text: each takes linear time and reports what is wrong.

Runs in a child process, because a quadratic regular expression would hold the GIL for an hour.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.errors import LocalLLMError, reason
from localllm.library.behaviour import behaviour_of
from localllm.library.entry import LibraryModel, Source
from localllm.library.go_templates import jinja_of
from localllm.library.hub import choose, parse_listing
from localllm.library.lookup import find, name_of_url
from localllm.library.manifest import Layer, Manifest, blob_name, parse_manifest
from localllm.library.modelfile import parse_modelfile
from localllm.library.names import ModelName, quantization_of, without_part
from localllm.settings import Settings, load_settings
from localllm.text import columns_of, harmless, table
from tests.waiting import PATIENCE_S

SIZE = 400_000
ROOT = Path(__file__).resolve().parents[3]

TEXTS = [
    (unit * (SIZE // len(unit)))[:SIZE]
    for unit in (
        "a",
        " ",
        "\n",
        "/",
        ":",
        ".",
        "-",
        "[",
        '"',
        "9",
        "{{",
        "}}{{",
        "<",
        "<|a",
        "[A",
        "<<a",
        "\x1b",
        "\u202e",
    )
]
TEXTS += [unit * (SIZE // len(unit)) for unit in ("-Q4_K", "-IQ1_A", "-00001-of-00002", "@a/", '{"a":', "[Errno 1")]
TEMPLATES = [*TEXTS, "<|im_start|><|im_end|>" + "{{ x }}" * (SIZE // 7), "{{" + "a}" * (SIZE // 2)]
RECIPES = [
    *TEXTS,
    'FROM a\nSYSTEM """' + "\n" * SIZE,
    'FROM a\nSYSTEM """' + '""\n' * (SIZE // 3),
    "FROM a\n" + "#\n" * (SIZE // 2),
    "FROM a\n" + "PARAMETER stop x\n" * (SIZE // 17),
    "FROM a\n" + "LICENSE x\n" * (SIZE // 10),
    "FROM a\nPARAMETER " + "a" * SIZE + " 1",
    "FROM a\nPARAMETER seed " + "9" * SIZE,
]
JSONS = [
    *(text.encode() for text in TEXTS),
    b'{"layers": ' + b"[" * SIZE,
    b'{"layers": [' + b'{"mediaType": "application/vnd.ollama.image.model"},' * (SIZE // 52) + b"{}]}",
    b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "size": ' + b"9" * SIZE + b"}]}",
    b'{"sha": "ab", "siblings": ['
    + b'{"rfilename": "a.gguf", "lfs": {"size": 1, "sha256": "x"}},' * (SIZE // 59)
    + b"{}]}",
]


def refused_or_read(work: Callable[[], object]) -> None:
    try:
        work()
    except LocalLLMError as error:
        assert len(str(error)) < 2000, str(error)[:3000]


def read_layers(folder: Path, kind: str, data: bytes) -> None:
    digest = f"sha256:{'a' * 64}"
    (folder / blob_name(digest)).write_bytes(data)
    manifest = Manifest((Layer(kind, digest, len(data)),))
    behaviour_of(LibraryModel(("x",), Source.OWN, folder / "none.gguf", manifest, blobs=folder))


def read_settings(folder: Path, text: str) -> None:
    file = folder / "config.toml"
    for content in (text, f'"{text}" = 1', f"seed = {text}", f"backend = '{text}'"):
        file.write_text(content)
        refused_or_read(lambda: load_settings({}, {}, file))
    refused_or_read(lambda: load_settings({}, {"LOCALLLM_SEED": text}, file.with_name("none")))
    refused_or_read(lambda: load_settings({}, {f"LOCALLLM_{text}": "1"}, file.with_name("none")))


def main(folder: Path) -> None:
    for template in TEMPLATES:
        refused_or_read(lambda text=template: jinja_of(text, None))  # type: ignore[misc]
        refused_or_read(lambda text=template: jinja_of(text, "<|im_start|><|im_end|>"))  # type: ignore[misc]
    for recipe in RECIPES:
        refused_or_read(lambda text=recipe: parse_modelfile(text))  # type: ignore[misc]
    for data in JSONS:
        refused_or_read(lambda data=data: parse_manifest(data, "here", "Do this.", own=True))  # type: ignore[misc]
        refused_or_read(lambda data=data: choose(parse_listing(data, "here")[1], ModelName("m")))  # type: ignore[misc]
        for kind in ("params", "messages", "system", "template", "license"):
            refused_or_read(lambda kind=kind, data=data: read_layers(folder, kind, data))  # type: ignore[misc]
    for text in TEXTS:
        names: tuple[Callable[[str], object], ...] = (ModelName.parse, lambda name: find(name, Settings()), name_of_url)
        for read in names:
            refused_or_read(lambda read=read, text=text: read(text))  # type: ignore[misc]
            refused_or_read(lambda read=read, text=text: read(f"http://h/{text}"))  # type: ignore[misc]
        read_settings(folder, text)
        for work in (quantization_of, without_part, harmless, columns_of, lambda text: table([(text, "x")])):
            work(text)
        reason(OSError(text))


@pytest.mark.slow
def test_every_reader_of_foreign_text_is_linear(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.localllm.library.test_hostile_text", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
