"""Models that are not here: their headers are fetched by ranges and give the same facts as the pulled files."""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.errors import ModelFileError
from gguf_io.system import disk_bytes
from localllm.library import preview
from localllm.library.errors import LibraryError, PullError
from localllm.library.preview import every_preview, previewed
from localllm.library.pull import pull
from localllm.library.suggestions import CHAT_TOKENS
from localllm.placement.memory import conversation_bytes
from localllm.settings import Settings
from tests.gguf_files import finish
from tests.localllm.library.model_server import ModelServer, cut, refuse


def model_bytes(folder: Path, tokens: int = 40, rows: int = 60_000) -> bytes:
    """A file whose tensors are far larger than its header, whose size depends on the number of tokens."""
    path = folder / "made.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("made")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_token_list([f"token number {index}" for index in range(tokens)])
    writer.add_tensor("blk.0.attn_k.weight", np.zeros((16, 32), np.float16))
    writer.add_tensor("token_embd.weight", np.ones((rows, 32), np.float16))
    finish(writer)
    return path.read_bytes()


def split_model(folder: Path, parts: int = 2) -> dict[str, bytes]:
    """A model of several files, one tensor each."""
    files = {}
    for number in range(parts):
        path = folder / f"Big-Q8_0-{number + 1:05}-of-{parts:05}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            writer.add_block_count(1)
            writer.add_embedding_length(32)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", parts)
        writer.add_tensor(f"blk.0.part_{number}.weight", np.ones((20_000, 32), np.float16))
        finish(writer)
        files[path.name] = path.read_bytes()
    return files


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """First ranges of a kilobyte, so that small headers need several."""
    monkeypatch.setattr("gguf_io.header.READ_AT_ONCE", 256)
    monkeypatch.setattr(preview, "FIRST_BYTES", 1 << 10)


def offer(server: ModelServer, kind: str, data: bytes) -> str:
    """Offer a model by one of the three kinds of sources; return its name."""
    if kind == "registry":
        server.add_ollama("library/made", "1b", {"model": data})
        return f"{server.host}/library/made:1b"
    if kind == "hub":
        server.add_hub("user/Made-GGUF", {"Made-Q8_0.gguf": data})
        return "hf.co/user/Made-GGUF:Q8_0"
    server.routes["/some/made.gguf"] = data
    return f"{server.url}/some/made.gguf"


def said(path: Path) -> tuple[object, ...]:
    """The facts that a plan of a file is based on."""
    with open_model(path) as file:
        return (
            dict(file.tensors),
            file.size_bytes,
            conversation_bytes(file, CHAT_TOKENS),
            file.metadata.get_str("general.name"),
        )


@pytest.mark.usefixtures("ranges")
@pytest.mark.parametrize("kind", ["registry", "hub", "address"])
def test_a_header_tells_what_the_pulled_file_tells(server: ModelServer, home: Path, kind: str) -> None:
    data = model_bytes(home, tokens=2000)
    name = offer(server, kind, data)
    with previewed(name) as found:
        before, size, stand_in = said(found.path), found.size, found.path
        assert stand_in.stat().st_size == len(data)
        if sys.platform != "win32":  # which does not tell
            assert disk_bytes(stand_in.stat()) < len(data) // 4  # the tensors are a hole
    assert not stand_in.exists()
    assert size == len(data)
    assert said(pull(name, Settings()).path) == before


@pytest.mark.usefixtures("ranges")
def test_ranges_double_until_the_header_is_whole_and_end_there(server: ModelServer, home: Path) -> None:
    data = model_bytes(home, tokens=2000)
    name = offer(server, "hub", data)
    with previewed(name) as found, open_model(found.path) as file:
        header = min(tensor.offset for tensor in file.tensors.values())
    asked = [headers["range"] for headers in server.fetched("/resolve/")]
    stops = [int(text.partition("-")[2]) + 1 for text in asked]
    assert asked[0] == "bytes=0-1023" and len(asked) > 3
    assert all(second >= 2 * first for first, second in pairwise(stops))
    assert header <= stops[-1] + file.alignment and stops[-1] < 2 * header < len(data)


@pytest.mark.parametrize("times", [1, 3])
def test_what_passes_is_tried_again(server: ModelServer, home: Path, times: int) -> None:
    name = offer(server, "registry", model_bytes(home))
    server.faults += [cut(times, 100), refuse(times, 503, part="/blobs/")]
    with previewed(name) as found, open_model(found.path) as file:
        assert file.name == "made"


def test_a_server_without_ranges_is_read_no_further_than_the_header(server: ModelServer, home: Path) -> None:
    server.ranges = False
    data = model_bytes(home)
    with previewed(offer(server, "registry", data)) as found:
        assert said(found.path)[1] == len(data)


def test_all_parts_of_a_split_model_are_read(server: ModelServer, home: Path) -> None:
    files = split_model(home)
    server.add_hub("user/Big-GGUF", files)
    with previewed("hf.co/user/Big-GGUF") as found:
        assert found.size == sum(map(len, files.values()))
        with open_model(found.path) as file:
            assert len(file.paths) == len(file.tensors) == 2


def test_every_quantisation_of_a_repository(server: ModelServer, home: Path) -> None:
    large, small = model_bytes(home, rows=9000), model_bytes(home, rows=5000)
    parts = split_model(home)
    projector = model_bytes(home, rows=10)
    server.add_hub(
        "user/Made-GGUF",
        {
            "Made-Q8_0.gguf": large,
            "Made-Q4_K_M.gguf": small,
            "mmproj-F16.gguf": projector,
            "Big-Q8_0-00001-of-00002.gguf": parts["Big-Q8_0-00001-of-00002.gguf"],  # its other part is missing
        },
    )
    found = [(each.name, each.size, each.projector) for each in every_preview("hf.co/user/Made-GGUF")]
    assert found == [
        ("hf.co/user/Made-GGUF:Q4_K_M", len(small), len(projector)),
        ("hf.co/user/Made-GGUF:Made-Q8_0", len(large), len(projector)),
    ]
    with pytest.raises(LibraryError, match="not a Hugging Face repository"):
        list(every_preview("qwen3:0.6b"))
    with previewed("hf.co/user/Made-GGUF:Q4_K_M") as one:  # where a plan looks for projectors
        (beside,) = one.path.parent.glob("mmproj*.gguf")
        assert beside.stat().st_size == len(projector)


@pytest.mark.parametrize("file", ["..\\..\\evil-Q8_0.gguf", "C:evil-Q8_0.gguf", "nul.Q8_0.gguf", "a:b-Q8_0.gguf"])
def test_the_hosts_names_of_files_name_no_file_here(server: ModelServer, home: Path, file: str) -> None:
    """On Windows, these would lead out of the folder, to a device, or into another stream of a file."""
    server.add_hub("user/Made-GGUF", {file: model_bytes(home)})
    with previewed("hf.co/user/Made-GGUF") as one:
        assert one.path.name == "model.gguf"


def hostile(change: Callable[[bytes], bytes]) -> Callable[[Path], bytes]:
    return lambda folder: change(model_bytes(folder))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hostile(lambda data: b"<html>" + data), "not a GGUF file"),
        (hostile(lambda data: data[:8] + b"\xff" * 8 + data[16:]), "tensor count"),
        (hostile(lambda data: data[: len(data) // 2]), "ends at byte"),
    ],
)
def test_hostile_headers_are_refused(
    server: ModelServer, home: Path, make: Callable[[Path], bytes], message: str
) -> None:
    name = offer(server, "hub", make(home))
    with pytest.raises(ModelFileError, match=message), previewed(name):
        pass


def test_another_length_than_the_list_says_is_refused(server: ModelServer, home: Path) -> None:
    data = model_bytes(home)
    name = offer(server, "hub", data)
    path = next(path for path in server.routes if "/resolve/" in path)
    server.routes[path] = data + b"more"
    with pytest.raises(PullError, match=f"has {len(data) + 4} bytes .* its listing says {len(data)}"), previewed(name):
        pass
