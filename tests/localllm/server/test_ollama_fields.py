"""Fields of Ollama's protocol that its official client does not send or show."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import PATIENCE_S

MODEL = "stories260K-Q8_0"
HELLO = [{"role": "user", "content": "Hi"}]


def post(server: Any, path: str, **body: Any) -> Any:
    answer = httpx.post(server.url + path, json={"model": MODEL, **body}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_is_rendered_and_nothing_computed(server: Any) -> None:
    told = post(server, "/api/chat", messages=HELLO, _debug_render_only=True)
    rendered = post(server, "/apply-template", messages=HELLO)["prompt"]
    assert told["_debug_info"] == {"rendered_template": rendered}
    assert told["done"] is False and told["message"]["content"] == ""
    raw = post(server, "/api/generate", prompt="Once", raw=True, _debug_render_only=True)
    assert raw["_debug_info"]["rendered_template"].endswith("Once") and raw["response"] == ""


def test_the_list_tells_what_models_can_do(server: Any) -> None:
    listed: list[dict[str, Any]] = [{}]
    while not all("capabilities" in model for model in listed):  # each list has more than the one before
        listed = httpx.get(f"{server.url}/api/tags", timeout=PATIENCE_S).json()["models"]
    assert all(model["capabilities"] == ["completion"] for model in listed if model["name"] == MODEL)
    assert all(model["details"]["context_length"] for model in listed)


def test_show_takes_what_a_user_would_add(server: Any) -> None:
    told = post(server, "/api/show", system="You are Tom.", options={"top_k": 3, "stop": ["a b"]})
    assert told["system"] == "You are Tom." and told["parameters"].splitlines() == ["top_k 3", 'stop "a b"']
    assert "license" not in told and told["tensors"] == []
    verbose = post(server, "/api/show", verbose=True)
    assert verbose["tensors"][0]["shape"] and len(verbose["model_info"]["tokenizer.ggml.tokens"]) == 512


@pytest.mark.parametrize(("names", "value"), [(("quantize",), "Q9"), (("quantization",), "Q9")])
def test_older_names_of_fields(server: Any, names: tuple[str, ...], value: str) -> None:
    body = {"name": "x", "from": MODEL, "stream": False, **dict.fromkeys(names, value)}
    answer = httpx.post(f"{server.url}/api/create", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400 and "unknown quantize type 'Q9'" in answer.json()["error"]


def test_a_template_of_a_manifest_is_in_the_recipe(start_server: Any, tmp_path: Path) -> None:
    template = "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}"
    template += "{{ if .Prompt }}<|im_start|>user\n{{ .Prompt }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
    with start_server(LOCALLLM_MODEL_STORE=str(tmp_path)) as server:
        made = {"model": "shaped", "from": MODEL, "template": template, "stream": False}
        assert httpx.post(f"{server.url}/api/create", json=made, timeout=PATIENCE_S).json() == {"status": "success"}
        told = post(server, "/api/show", model="shaped")
        assert f'TEMPLATE """{template}"""\n' in told["modelfile"]
        info = post(server, "/api/chat", model="shaped", messages=HELLO, _debug_render_only=True)["_debug_info"]
        assert "<|im_start|>user\nHi<|im_end|>" in info["rendered_template"]


def rendered(server: Any, **body: Any) -> str:
    told = post(server, "/api/generate", _debug_render_only=True, **body)
    return str(told["_debug_info"]["rendered_template"])


def test_a_template_of_a_request(server: Any) -> None:
    go = "{{ if .System }}[{{ .System }}] {{ end }}Q: {{ .Prompt }}\nA: {{ .Response }}\n"
    assert rendered(server, prompt="Why?", template=go) == "Q: Why?\nA: "
    assert rendered(server, prompt="Why?", system="Be brief.", template=go) == "[Be brief.] Q: Why?\nA: "
    assert rendered(server, prompt="Once", template="{{ .Prompt }}") == "Once"
    jinja = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    assert rendered(server, prompt="Once", template=jinja) == "<Once>"
    greedy = {"temperature": 0, "num_predict": 8}
    asked = {"stream": False, "options": greedy}
    plain = post(server, "/api/generate", prompt="Once upon a time", raw=True, **asked)["response"]
    shaped = {"prompt": "upon a", "template": "Once {{ .Prompt }} time"}
    assert post(server, "/api/generate", **shaped, **asked)["response"] == plain


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "x", "template": "{{ .Nothing }}"}, "reads .Nothing"),
        ({"prompt": "x", "template": "{% for %}"}, "template"),
        ({"prompt": "x", "suffix": "y", "template": "{{ .Prompt }}"}, "no suffix"),
        ({"prompt": "x", "raw": True, "template": "{{ .Prompt }}"}, "raw mode does not support template"),
        ({"prompt": "", "context": [1, 2], "system": "Be."}, "system needs a prompt"),
    ],
)
def test_templates_that_are_refused(server: Any, body: dict[str, Any], said: str) -> None:
    answer = httpx.post(f"{server.url}/api/generate", json={"model": MODEL, **body}, timeout=PATIENCE_S)
    assert answer.status_code == 400 and said in answer.json()["error"]


def test_a_context_goes_before_the_template(server: Any) -> None:
    """As in Ollama: the template writes the new prompt and its system text after the tokens."""
    asked: dict[str, Any] = {"stream": False, "options": {"temperature": 0, "num_predict": 4}}
    go = "{{ if .System }}[{{ .System }}] {{ end }}{{ .Prompt }} "
    first = post(server, "/api/generate", prompt="Once upon a time", **asked)["context"]
    again = {"prompt": "there was", "context": first, "system": "Be.", "template": go}
    text = rendered(server, **again)
    assert text.endswith("[Be.] there was ") and text.count("Once upon a time") == 1
    told = post(server, "/api/generate", **again, **asked)
    assert told["context"][: len(first)] == first and told["context"].count(1) == 1  # BOS comes first
