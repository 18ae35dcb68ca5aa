"""Requests that select LoRA adapters of a running server."""

from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest

from tests.gpu_offload import lora_files
from tests.localllm.server.conftest import Server, StartServer
from tests.oracle import llama_oracle
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.oracle, llama_oracle.needs_llama]
MODEL = "stories260K-F32"
PROMPT = "Once upon a time"


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
