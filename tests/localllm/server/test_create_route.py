"""/api/create: from parts, in another format, and what it refuses."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import pytest

from tests.gpu_offload import lora_files
from tests.localllm.server.made_models import split
from tests.localllm.wings.importing.tiny_models import write_safetensors
from tests.systems import own_places
from tests.waiting import PATIENCE_S

GREEDY = {"temperature": 0, "num_predict": 8}
F16, Q8 = "stories260K-F16", "stories260K-Q8_0"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def library(start_server: Any, store: Path) -> Iterator[Any]:
    with start_server(models=(F16, Q8), LOCALLLM_MODEL_STORE=str(store)) as server:
        yield server


@pytest.fixture
def client(library: Any) -> Iterator[ollama.Client]:
    with ollama.Client(host=library.url) as client:
        yield client


def test_parts_make_one_model(client: ollama.Client, model_files: Path, tmp_path: Path, store: Path) -> None:
    parts = split(model_files / f"{Q8}.gguf", tmp_path, 20)
    assert len(parts) > 1
    files = {part.name: client.create_blob(part) for part in reversed(parts)}
    assert client.create("parts", files=files).status == "success"
    assert client.generate("parts", "Once upon a time", options=GREEDY).response == (
        client.generate(Q8, "Once upon a time", options=GREEDY).response
    )
    client.create("again", files=files)
    client.delete("parts")
    assert client.generate("again", "Once", options=GREEDY).response
    client.delete("again")
    with pytest.raises(ollama.ResponseError, match="part"):
        client.create("one", files=dict(list(files.items())[:1]))
    assert not list((store / "manifests").rglob("one"))


def test_a_model_in_another_format(client: ollama.Client, store: Path) -> None:
    told = list(client.create("small", from_=F16, quantize="q8_0", system="Be brief.", stream=True))
    assert told[-1].status == "success" and any("q8_0" in (line.status or "") and line.total for line in told)
    assert client.show("small").details.quantization_level == "Q8_0"  # type: ignore[union-attr]
    assert client.generate("small", "Once upon a time", raw=True, options=GREEDY).response == (
        client.generate(Q8, "Once upon a time", raw=True, options=GREEDY).response
    )
    client.create("smaller", from_="small", system="Be very brief.")
    client.delete("small")
    assert client.generate("smaller", "Once", options=GREEDY).response
    assert not list((store / "partial").glob("*.gguf"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"from": Q8, "quantize": "Q8_0"}, "quantised already"),
        ({"from": F16, "quantize": "Q9_9"}, "unknown quantize type"),
        ({"from": F16, "adapters": {"a": "sha256:" + "0" * 64}}, "upload it"),
        ({"from": F16, "adapters": {"a": "../../etc/passwd"}}, "invalid digest"),
        ({"from": F16, "adapters": {f"{number}": "sha256:" + "0" * 64 for number in range(100)}}, "at most 64"),
        ({"from": F16, "draft_files": {"a": "sha256:" + "0" * 64}}, "draft_files"),
        ({"from": F16, "template": "{% for a in range(9) %}{{ 9**9**9 }}{% endfor %}"}, "template"),
        ({"from": F16, "template": "{{ .System }} and nobody's family <|x|>"}, "not of a known family"),
        ({"files": {"x.gguf": "sha256:" + "0" * 64}}, "upload it"),
        ({"from": F16, "renderer": "qwen3-coder"}, "renderer"),
        ({"from": F16, "quantization": "Q9_9"}, "unknown quantize type"),
        ({"files": {f"{number}": "sha256:" + "0" * 64 for number in range(600)}}, "at most 512"),
    ],
)
def test_refusals_say_why(library: Any, store: Path, changes: dict[str, Any], words: str) -> None:
    answer = httpx.post(
        f"{library.url}/api/create", json={"model": "x", "stream": False, **changes}, timeout=PATIENCE_S
    )
    assert answer.status_code == 400 and words in answer.json()["error"]
    streamed = httpx.post(f"{library.url}/api/create", json={"model": "x", **changes}, timeout=PATIENCE_S)
    assert words in streamed.text and "success" not in streamed.text
    assert not list((store / "manifests").rglob("x"))


def test_what_a_model_was_given_is_shown(client: ollama.Client) -> None:
    parameters = {"temperature": 0.25, "num_ctx": 64, "stop": ["END", 'a "b"'], "num_gpu": 0}  # only the last is kept
    licenses = ["As you like.", "Within reason."]
    client.create("told", from_=Q8, system="You tell of ships.", parameters=parameters, license=licenses)
    shown = client.show("told")
    assert shown.license == "\n".join(licenses)
    assert (shown.modelfile or "").endswith('LICENSE """As you like."""\nLICENSE """Within reason."""\n')
    assert (shown.parameters or "").splitlines() == ["num_ctx 64", "temperature 0.25", 'stop "END"', 'stop "a \\"b\\""']
    assert "PARAMETER num_ctx 64\n" in (shown.modelfile or "")
    client.delete("told")


def test_a_models_own_parameters_sample_on_every_protocol(client: ollama.Client, library: Any) -> None:
    own = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repeat_last_n": 16, "typical_p": 0.9, "seed": 3}
    client.create("own", from_=Q8, parameters=own)
    most = {"num_predict": 24}
    plain = client.generate(Q8, "Once", raw=True, options={**most, "seed": 3}).response
    wanted = client.generate(Q8, "Once", raw=True, options={**most, **own}).response
    assert client.generate("own", "Once", raw=True, options=most).response == wanted != plain
    usual = {"top_p": 0.9, "temperature": 0.8, "prompt": "Once", "max_tokens": 24}
    openai = httpx.post(f"{library.url}/v1/completions", json={"model": "own", **usual}, timeout=PATIENCE_S).json()
    assert openai["choices"][0]["text"] == wanted
    off = {"frequency_penalty": 0, "presence_penalty": 0}
    told = httpx.post(f"{library.url}/v1/completions", json={"model": "own", **usual, **off}, timeout=PATIENCE_S).json()
    assert told["choices"][0]["text"] != wanted  # the request takes precedence
    client.delete("own")


def test_first_tokens_that_a_window_keeps(client: ollama.Client) -> None:
    """num_keep of a request, else the model's own, else four; and a quarter of the context for its newest tokens."""
    client.create("keeping", from_=Q8, parameters={"num_keep": 20})

    def kept(name: str, **options: Any) -> int | None:
        options |= {"temperature": 0, "num_ctx": 48, "num_predict": 2}
        return client.generate(name, "Once upon a time. " * 40, raw=True, options=options).prompt_eval_count

    assert kept("keeping") == kept(Q8, num_keep=20) == 20 + 12
    assert kept("keeping", num_keep=4) == kept(Q8) == 4 + 20
    assert kept(Q8, num_keep=-1) == 23 + 12  # all of the prompt, if it takes less than half
    client.delete("keeping")


def test_an_uploaded_adapter_is_kept_with_the_model(
    client: ollama.Client, model_files: Path, tmp_path: Path, store: Path
) -> None:
    made = lora_files.factors(model_files / "stories260K-F32.gguf", 1)
    digest = client.create_blob(lora_files.write(tmp_path / "adapter.gguf", made))
    client.create("adapted", from_=Q8, adapters={"adapter.gguf": digest})
    (manifest,) = (store / "manifests").rglob("adapted/latest")
    assert f'"digest": "{digest}"' in manifest.read_text(encoding="utf-8")
    assert "ADAPTER" in (client.show("adapted").modelfile or "")
    plain = client.create_blob(model_files / f"{Q8}.gguf")
    with pytest.raises(ollama.ResponseError, match="not a LoRA adapter"):
        client.create("wrong", from_=Q8, adapters={"model.gguf": plain})
    client.delete("adapted")


def test_kill_9_loses_nothing_that_was_stored(start_server: Any, model_files: Path, tmp_path: Path) -> None:
    stored = {"LOCALLLM_MODEL_STORE": str(tmp_path / "store"), **own_places(tmp_path)}
    with start_server(models=(), **stored) as server, ollama.Client(host=server.url) as client:
        digest = client.create_blob(model_files / f"{Q8}.gguf")
        client.create("kept", files={"model.gguf": digest})
        answer = client.generate("kept", "Once upon a time", options=GREEDY).response
        body = {"model": "kept", "prompt": "Once", "options": {"num_predict": 500}}
        with httpx.stream("POST", f"{server.url}/api/generate", json=body, timeout=PATIENCE_S) as stream:
            next(stream.iter_lines())
            os.kill(server.process.pid, 9)
            server.process.wait()
    with start_server(models=(), **stored) as server, ollama.Client(host=server.url) as client:
        assert client.generate("kept", "Once upon a time", options=GREEDY).response == answer
        assert client.delete("kept").status == "success"


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
WORKS: dict[str, Any] = {"peft_type": "LORA", "lora_alpha": 8, "r": 4}


def peft(tmp_path: Path, width: int = 64, config: Any = WORKS, cut: int = 0) -> dict[str, Path]:
    """An adapter in PEFT's format for the model stories260K. cut: bytes that are missing at its end."""
    values = np.random.default_rng(7).normal(0, 2, (4, width)).astype(np.float32)
    tensors = {f"{Q_PROJ}.lora_A.weight": ("F32", values), f"{Q_PROJ}.lora_B.weight": ("F32", values.T.copy())}
    write_safetensors(tmp_path / "weights", tensors)
    (tmp_path / "weights").write_bytes((tmp_path / "weights").read_bytes()[: -cut or None])
    (tmp_path / "config").write_text(config if isinstance(config, str) else json.dumps(config))
    return {"adapter_config.json": tmp_path / "config", "adapter_model.safetensors": tmp_path / "weights"}


def test_pefts_adapter_is_converted(client: ollama.Client, tmp_path: Path, store: Path) -> None:
    files = {name: client.create_blob(path) for name, path in peft(tmp_path).items()}
    (tmp_path / "tokenizer").write_text("{}")
    files["tokenizer_config.json"] = client.create_blob(tmp_path / "tokenizer")  # Ollama's client sends it too
    plain = client.generate(Q8, "Once upon a time", raw=True, options=GREEDY).response
    for name in ("peft", "again"):
        client.create(name, from_=Q8, adapters=files)
        assert client.generate(name, "Once upon a time", raw=True, options=GREEDY).response != plain
    one, other = (next((store / "manifests").rglob(f"{name}/latest")).read_text() for name in ("peft", "again"))
    assert one == other
    for name in ("peft", "again"):
        client.delete(name)


@pytest.mark.parametrize(
    ("made", "named", "words"),
    [
        ({}, {"adapter_config.json": "adapter_config.json"}, "lacks adapter_model.safetensors"),
        ({}, {"adapter_model.safetensors": "adapter_model.safetensors"}, "lacks adapter_config.json"),
        ({}, {"tokenizer.json": "adapter_config.json"}, "lacks adapter_config.json and adapter_model.safetensors"),
        ({}, {"adapters.safetensors": "adapter_model.safetensors"}, "'adapters.safetensors' is no adapter"),
        ({}, {"../adapter_config.json": "adapter_config.json"}, "must be a relative path"),
        ({}, {"/etc/adapter_model.safetensors": "adapter_model.safetensors"}, "must be a relative path"),
        ({}, {"..\\adapter_config.json": "adapter_config.json"}, "must be a relative path"),
        ({}, {f"{folder}/adapter_config.json": "adapter_config.json" for folder in "ab"}, "two files adapter_config"),
        ({"width": 96}, None, "have the shapes (4, 96) and (96, 4), which do not fit"),
        ({"cut": 100}, None, "adapter_model.safetensors"),
        ({"config": WORKS | {"use_dora": True}}, None, "use_dora is True"),
        ({"config": "{"}, None, "adapter_config.json"),
        ({"config": "[]"}, None, "adapter_config.json"),
    ],
)
def test_wrong_peft_adapters_are_refused_in_a_sentence(
    client: ollama.Client, tmp_path: Path, store: Path, made: dict[str, Any], named: Any, words: str
) -> None:
    digests = {name: client.create_blob(path) for name, path in peft(tmp_path, **made).items()}
    files = digests if named is None else {name: digests[one] for name, one in named.items()}
    with pytest.raises(ollama.ResponseError) as refused:
        client.create("wrong", from_=Q8, adapters=files)
    assert refused.value.status_code == 400
    assert words in refused.value.error and "localllm-" not in refused.value.error
    assert not list((store / "manifests").rglob("wrong"))
