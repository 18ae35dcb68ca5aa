"""Requests that select LoRA adapters of a running server."""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gpu_offload import lora_files
from tests.localllm.server.conftest import Server, StartServer
from tests.oracle import llama_oracle
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.oracle, llama_oracle.needs_llama]
MODEL = "stories260K-F32"
PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def tuned(start_server: StartServer, model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    factors = lora_files.factors(model_files / f"{MODEL}.gguf", 3)
    file = lora_files.write(tmp_path_factory.mktemp("adapters") / "tuned.gguf", factors)
    with start_server("--lora", f"{file}:0", models=(MODEL,), LOCALLLM_BACKEND="native") as server:
        yield server


def weigh_adapters(server: Server, ask: Callable[..., httpx.Response], expected: Mapping[str, str]) -> None:
    """Change the usual weights and change them back; requests that choose adapters, also by name, keep theirs."""
    address = f"{server.url}/lora-adapters"

    def scales() -> list[float]:
        return [one["scale"] for one in httpx.get(address, timeout=PATIENCE_S).json()]

    for body, now, usual in [
        ([{"id": 1, "scale": 1.0}], [0, 1], "other"),
        ([], [0, 0], "plain"),
        ([{"id": 1, "scale": 0}, {"id": 0, "scale": 0.5}], [0.5, 0], "usual"),
    ]:
        told = httpx.post(address, json=body, params={"model": MODEL}, timeout=PATIENCE_S)
        assert (told.status_code, told.json(), scales()) == (200, {"success": True}, now)
        for name, more in [
            (usual, {}),
            ("plain", {"lora": []}),
            ("usual", {"lora": [{"id": 0, "scale": 0.5}]}),
            ("other", {"model": f"{MODEL}:two"}),
        ]:
            for _ in range(2):  # computed, then from the cache
                assert ask(**more).json()["choices"][0]["text"].strip() == expected[name], (body, more)
    for wrong in ([{"id": 2}], [{"id": 0}, {"id": 0}], [{"id": 0, "scale": 1e9}], [{"scale": 1}], {"id": 0}, [[]]):
        assert httpx.post(address, json=wrong, timeout=PATIENCE_S).status_code == 400, wrong
    named = httpx.post(address, json=[], params={"model": f"{MODEL}:one"}, timeout=PATIENCE_S)
    assert named.status_code == 400 and "always applies" in named.text
    assert scales() == [0.5, 0]
    httpx.post(address, json=[{"id": 1}], params={"model": MODEL}, timeout=PATIENCE_S)
    httpx.post(f"{server.url}/api/generate", json={"model": MODEL, "keep_alive": 0}, timeout=PATIENCE_S)
    assert ask().json()["choices"][0]["text"].strip() == expected["other"], "weights outlast the model in memory"
    httpx.post(address, json=[{"id": 0, "scale": 0.5}], timeout=PATIENCE_S)


@pytest.mark.parametrize("backend", ["llama", "native"])
def test_each_request_uses_the_adapters_it_names(
    backend: str, start_server: StartServer, model_files: Path, tmp_path: Path
) -> None:
    path = model_files / f"{MODEL}.gguf"
    one, two = lora_files.factors(path, 1), lora_files.factors(path, 2)
    files = {"plain": path}
    for name, weighted in {"usual": [(one, 0.5)], "other": [(two, 1.0)]}.items():
        files[name] = lora_files.merge(path, tmp_path / f"{name}.gguf", *weighted)
    first = lora_files.write(tmp_path / "one.gguf", one)
    second = lora_files.write(tmp_path / "two.gguf", two)
    ids = llama_oracle.tokenize(path, PROMPT)
    expected = {
        name: llama_oracle.detokenize(file, llama_oracle.greedy(file, ids, 12)).decode(errors="replace").strip()
        for name, file in files.items()
    }
    assert len(set(expected.values())) == 3

    flags = ("--lora", f"{first}:0.5", "--lora", f"{second}:0", "--ctx", "256")
    with start_server(*flags, models=(MODEL,), LOCALLLM_BACKEND=backend) as server:

        def ask(**more: object) -> httpx.Response:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)

        asked = [
            ("usual", {}),
            ("plain", {"lora": []}),
            ("other", {"lora": [{"id": 1}]}),
            ("usual", {"lora": [{"id": 0, "scale": 0.5}]}),
            ("plain", {"lora": [{"id": 0, "scale": 0}]}),
            ("usual", {"model": f"{MODEL}:one"}),
            ("other", {"model": f"{MODEL}:two"}),
            ("plain", {"model": f"{MODEL}:two", "lora": []}),
        ]
        for name, more in asked:
            assert ask(**more).json()["choices"][0]["text"].strip() == expected[name], (name, more)
        listed = httpx.get(f"{server.url}/lora-adapters", timeout=PATIENCE_S).json()
        assert listed == [{"id": 0, "path": "one.gguf", "scale": 0.5}, {"id": 1, "path": "two.gguf", "scale": 0}]
        rows = {row["id"]: row for row in httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"]}
        assert [rows[f"{MODEL}:{name}"]["parent"] for name in ("one", "two")] == [MODEL, MODEL]
        assert "parent" not in rows[MODEL]
        version = {"anthropic-version": "2023-06-01"}
        theirs = httpx.get(f"{server.url}/v1/models?limit=100", headers=version, timeout=PATIENCE_S).json()["data"]
        assert {row["id"] for row in theirs} == rows.keys()
        row = httpx.get(f"{server.url}/v1/models/{MODEL}:one", timeout=PATIENCE_S).json()
        assert (row["id"], row["parent"], row["root"]) == (f"{MODEL}:one", MODEL, MODEL)
        weigh_adapters(server, ask, expected)
        refused = ask(lora=[{"id": 2}])
        assert (refused.status_code, "no adapter 2" in refused.text) == (400, True)
        body = {"model": MODEL, "prompt": PROMPT, "stream": False}
        for name, lora in (("plain", []), ("other", [{"id": 1}])):
            options = {"temperature": 0, "num_predict": 12, "lora": lora}
            answer = httpx.post(f"{server.url}/api/generate", json={**body, "options": options}, timeout=PATIENCE_S)
            assert answer.json()["response"].strip() == expected[name], name
        (row,) = httpx.get(f"{server.url}/api/ps", timeout=PATIENCE_S).json()["models"]
        assert row["backend"] == ("llama.cpp" if backend == "llama" else "native")


@pytest.mark.parametrize(
    ("route", "asked", "path"),
    [
        ("/api/generate", {"prompt": PROMPT, "stream": False}, ("response",)),
        ("/api/chat", {"messages": CHAT, "stream": False}, ("message", "content")),
        ("/v1/completions", {"prompt": PROMPT}, ("choices", 0, "text")),
        ("/v1/chat/completions", {"messages": CHAT}, ("choices", 0, "message", "content")),
        ("/v1/responses", {"input": PROMPT}, ("output", 0, "content", 0, "text")),
        ("/v1/messages", {"messages": CHAT}, ("content", 0, "text")),
        ("/completion", {"prompt": PROMPT}, ("content",)),
    ],
)
def test_every_protocols_route_takes_an_adapter_by_name(
    tuned: Server, route: str, asked: dict[str, Any], path: tuple[Any, ...]
) -> None:
    """In routes that have the field lora, by that too; a name that is no adapter's is not found."""
    options = {"num_predict": 8, "temperature": 0}
    limits = {"max_tokens": 8, "max_output_tokens": 8, "n_predict": 8, "temperature": 0, "options": options}

    def ask(model: str, **more: object) -> httpx.Response:
        return httpx.post(f"{tuned.url}{route}", json={**limits, **asked, "model": model, **more}, timeout=PATIENCE_S)

    def text(answer: httpx.Response) -> str:
        return str(reduce(lambda part, name: part[name], path, answer.json()))

    changed = text(ask(f"{MODEL}:tuned"))
    assert text(ask(MODEL)) != changed
    lora = {"lora": [{"id": 0, "scale": 1}]}
    if route != "/v1/responses":
        assert text(ask(MODEL, **({"options": options | lora} if route.startswith("/api/") else lora))) == changed
    absent = ask(f"{MODEL}:absent")
    assert absent.status_code == 404 and "it has tuned" in absent.text
