import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.library.errors import PullError
from localllm.library.lookup import find, users_models
from localllm.library.pull import PullStatus, pull
from tests.gguf_files import finish
from tests.localllm.library.model_server import ModelServer, cut
from tests.localllm.library.store_contents import SETTINGS


def test_a_model_of_an_ollama_registry(server: ModelServer, big_gguf: bytes) -> None:
    layers = {
        "model": big_gguf,
        "template": b"{{ .Prompt }}",
        "system": b"Be brief.",
        "params": b'{"temperature": 0.25}',
        "license": b"MIT",
        "projector": b"eyes",
    }
    digests = server.add_ollama("library/big", "1b", layers)
    told: list[PullStatus] = []
    model = pull(f"{server.host}/library/big:1b", SETTINGS, told.append)
    assert model.path.read_bytes() == big_gguf
    assert model.name == f"{server.host}/library/big:1b"
    defaults = find(model.name, SETTINGS).defaults()
    assert (defaults.template, defaults.system, defaults.licenses) == ("{{ .Prompt }}", "Be brief.", ("MIT",))
    assert defaults.parameters == {"temperature": 0.25}
    (projector,) = defaults.projectors
    assert (projector.read_bytes(), f"sha256:{projector.name[7:]}") == (b"eyes", digests["projector"])
    assert told[0].status == "pulling manifest"
    assert told[-1].status == "success"
    total = sum(map(len, layers.values()))
    assert (told[-1].completed, told[-1].total) == (total, total)
    assert all(status.completed <= total for status in told)
    assert not list((model.path.parents[1] / "partial").iterdir())


def test_a_model_removed_at_once_is_reported(
    server: ModelServer, tiny_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add_ollama("library/a", "latest", {"model": tiny_gguf})
    monkeypatch.setattr("localllm.library.pull.stored_models", lambda *_: iter(()))
    with pytest.raises(PullError, match="was removed as soon as it was pulled"):
        pull(f"{server.host}/library/a", SETTINGS)


def test_parts_come_in_parallel_ranges(server: ModelServer, big_gguf: bytes) -> None:
    digests = server.add_ollama("library/big", "latest", {"model": big_gguf})
    pull(f"{server.host}/library/big", SETTINGS)
    ranges = [headers["range"] for headers in server.fetched(digests["model"])]
    assert len(ranges) == 1 + -(-len(big_gguf) // (64 << 10))  # one byte to check for range support
    assert len(set(ranges)) == len(ranges)


def test_what_is_here_is_not_fetched_again(server: ModelServer, tiny_gguf: bytes) -> None:
    server.add_ollama("library/a", "latest", {"model": tiny_gguf, "system": b"x"})
    server.add_ollama("library/b", "latest", {"model": tiny_gguf, "system": b"y"})
    pull(f"{server.host}/library/a", SETTINGS)
    server.requests.clear()
    pull(f"{server.host}/library/b", SETTINGS)
    digest = hashlib.sha256(tiny_gguf).hexdigest()
    assert server.fetched(digest) == []
    assert len(list(users_models(SETTINGS))) == 2


@pytest.mark.parametrize(
    ("tag", "file", "name"),
    [
        ("", "Tiny-Q4_K_M.gguf", "Q4_K_M"),
        (":q8_0", "Tiny-Q8_0.gguf", "Q8_0"),
        (":Tiny-Q8_0", "Tiny-Q8_0.gguf", "Q8_0"),
        (":F16", "F16/Tiny.gguf", "F16"),
    ],
)
def test_a_quantisation_of_a_hugging_face_repository(
    server: ModelServer, tiny_gguf: bytes, tag: str, file: str, name: str
) -> None:
    others = [b"GGUF" + bytes(100 + number) for number in range(4)]
    names = ["Tiny-Q8_0.gguf", "Tiny-Q4_K_M.gguf", "F16/Tiny.gguf", "Tiny-Q2_K.gguf"]
    files = {other: tiny_gguf if other == file else data for other, data in zip(names, others, strict=True)}
    server.add_hub("user/Tiny-GGUF", {**files, "mmproj-F16.gguf": b"eyes"})
    model = pull(f"hf.co/user/Tiny-GGUF{tag}", SETTINGS)
    assert model.path.read_bytes() == tiny_gguf
    assert model.name == f"hf.co/user/Tiny-GGUF:{name}"
    assert find(f"hf.co/user/Tiny-GGUF{tag}", SETTINGS).path == model.path


def test_a_projector_comes_with_its_model(server: ModelServer, tiny_gguf: bytes, command: Callable[..., int]) -> None:
    """The projector beside the model, in the type without loss; models created from it have it too."""
    files = {"a/t-Q8_0.gguf": tiny_gguf, "a/mmproj-t-Q8_0.gguf": b"small", "a/mmproj-t-F16.gguf": b"fitting"}
    server.add_hub("user/t-GGUF", {**files, "a/mmproj-t-F32.gguf": b"too large", "mmproj-F16.gguf": b"of another"})
    model = pull("hf.co/user/t-GGUF", SETTINGS)
    assert [path.read_bytes() for path in model.defaults().projectors] == [b"fitting"]
    Path("Modelfile").write_text("FROM hf.co/user/t-GGUF:Q8_0\nSYSTEM Look.", encoding="utf-8")
    assert command("create", "looking") == 0
    assert find("looking", SETTINGS).defaults().projectors == model.defaults().projectors
    assert command("rm", model.name) == 0
    assert [path.read_bytes() for path in find("looking", SETTINGS).defaults().projectors] == [b"fitting"]
    assert command("rm", "looking") == 0
    assert not model.path.exists()


def test_a_quantisation_that_is_not_there_is_answered_by_those_that_are(server: ModelServer, tiny_gguf: bytes) -> None:
    server.add_hub("user/r", {"r-Q8_0.gguf": tiny_gguf, "r-Q2_K.gguf": tiny_gguf})
    with pytest.raises(PullError, match=r"user/r has no Q4_0\. It has: Q2_K, Q8_0\."):
        pull("hf.co/user/r:Q4_0", SETTINGS)
    server.add_hub("user/empty", {})
    with pytest.raises(PullError, match="has no GGUF files"):
        pull("hf.co/user/empty", SETTINGS)


def test_a_split_model_is_whole_and_loads(server: ModelServer, tmp_path: Path, home: Path) -> None:
    parts = split_model(tmp_path)
    server.add_hub("user/split", {f"Q8_0/m-Q8_0-{n:05}-of-00002.gguf": part for n, part in enumerate(parts, 1)})
    model = pull("hf.co/user/split", SETTINGS)
    from gguf_io import open_model

    with open_model(model.path) as file:
        assert [path.read_bytes() for path in file.paths] == parts
        assert set(file.tensors) == {"a", "b"}
    server.add_hub("user/broken", {"m-Q8_0-00001-of-00002.gguf": parts[0]})
    with pytest.raises(PullError, match="has 1 of the 2 parts"):
        pull("hf.co/user/broken", SETTINGS)


def split_model(folder: Path) -> list[bytes]:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(folder / "s.gguf", "llama", split_max_tensors=1)
    writer.add_tensor("a", np.ones((4, 8), np.float32))
    writer.add_tensor("b", np.ones((4, 8), np.float32))
    finish(writer)
    return [path.read_bytes() for path in sorted(folder.glob("s-*.gguf"))]


def test_a_file_at_any_address(server: ModelServer, big_gguf: bytes) -> None:
    server.routes["/models/big.gguf"] = big_gguf
    server.headers["/models/big.gguf"] = {"ETag": '"v1"'}
    url = f"{server.url}/models/big.gguf"
    assert pull(url, SETTINGS).path.read_bytes() == big_gguf
    assert find(url, SETTINGS).path.read_bytes() == big_gguf
    assert server.fetched("/models/")[-1]["if-range"] == '"v1"'


def test_a_server_without_ranges(server: ModelServer, big_gguf: bytes) -> None:
    server.ranges = False
    server.add_ollama("library/big", "latest", {"model": big_gguf})
    server.faults.append(cut(2, 100_000))
    assert pull(f"{server.host}/library/big", SETTINGS).path.read_bytes() == big_gguf
