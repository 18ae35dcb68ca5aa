"""Filling in the middle, with a model whose vocabulary has the tokens for it; images are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.localllm.server.made_models import with_metadata
from tests.waiting import PATIENCE_S, eventually

PREFIX, SUFFIX = "Once upon a time", "the end."
MARKS = {"fim_pre": 400, "fim_suf": 401, "fim_mid": 402}
REPOSITORY = MARKS | {"fim_rep": 403, "fim_sep": 404}
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
DATA_URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}


@pytest.fixture(scope="module")
def filler(start_server: Any, model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of "filler", and of "reader", which knows other files too."""
    folder = tmp_path_factory.mktemp("filler")
    for path, marks in ((folder / "filler.gguf", MARKS), (folder / "reader.gguf", REPOSITORY)):
        flags = [text for name, token in marks.items() for text in ("--special-token-by-id", name, str(token))]
        with_metadata(model_files / "stories260K-Q8_0.gguf", path, *flags)
    with start_server(
        "--model", str(folder / "filler.gguf"), "--model", str(folder / "reader.gguf"), models=()
    ) as server:
        yield server


def tokens_of(filler: Any, text: str) -> list[int]:
    answer = httpx.post(f"{filler.url}/tokenize", json={"model": "filler", "content": text}, timeout=PATIENCE_S)
    return list(answer.json()["tokens"])


def answered(filler: Any, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{filler.url}{path}", json={"temperature": 0, "n_predict": 8, **body}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def middle(filler: Any) -> str:
    """What the model writes between the texts: a continuation of the prompt given as tokens."""
    prompt = [
        *(1, MARKS["fim_pre"], *tokens_of(filler, PREFIX)),
        *(MARKS["fim_suf"], *tokens_of(filler, SUFFIX), MARKS["fim_mid"]),
    ]
    body = {"model": "filler", "prompt": prompt, "temperature": 0, "max_tokens": 8}
    text = httpx.post(f"{filler.url}/v1/completions", json=body, timeout=PATIENCE_S).json()["choices"][0]["text"]
    assert text
    return str(text)


def test_suffix_of_both_protocols(filler: Any, middle: str) -> None:
    with ollama.Client(host=filler.url) as client:
        options = {"temperature": 0, "num_predict": 8}
        assert client.generate("filler", PREFIX, suffix=SUFFIX, options=options).response == middle
        streamed = client.generate("filler", PREFIX, suffix=SUFFIX, options=options, stream=True)
        assert "".join(piece.response for piece in streamed) == middle
        assert client.generate("filler", "", suffix=SUFFIX, options=options).done_reason == "length"
        assert "insert" in (client.show("filler").capabilities or [])
    with openai.OpenAI(base_url=f"{filler.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="filler", prompt=PREFIX, suffix=SUFFIX, temperature=0, max_tokens=8)
        assert answer.choices[0].text == middle
        with pytest.raises(openai.BadRequestError, match="a single prompt"):
            client.completions.create(model="filler", prompt=[PREFIX, PREFIX], suffix=SUFFIX)


def test_infill_whole_and_streamed(filler: Any, middle: str) -> None:
    body = {"model": "filler", "input_prefix": PREFIX, "input_suffix": SUFFIX, "temperature": 0, "n_predict": 8}
    whole = httpx.post(f"{filler.url}/infill", json=body, timeout=PATIENCE_S).json()
    assert whole["content"] == middle and whole["stop"] and whole["stop_type"] == "limit"
    stopped = httpx.post(f"{filler.url}/infill", json=body | {"stop": [middle[2:4]]}, timeout=PATIENCE_S).json()
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", middle[2:4])
    banned = httpx.post(
        f"{filler.url}/infill", json=body | {"logit_bias": [[middle, False]]}, timeout=PATIENCE_S
    ).json()
    assert banned["content"] and not set(banned["content"].split()) & set(middle.split())
    lines = httpx.post(f"{filler.url}/infill", json=body | {"stream": True}, timeout=PATIENCE_S).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == middle
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_other_files_come_before_the_gap(filler: Any) -> None:
    """In Qwen 2.5 Coder's form: [repository] name [file] name text ... [file] name [prefix] ..."""
    files = [{"filename": "cat.txt", "text": "A cat sat."}, {"filename": "dog.txt", "text": "A dog ran.\n"}]
    rep, sep = REPOSITORY["fim_rep"], REPOSITORY["fim_sep"]
    gap = [
        *(MARKS["fim_pre"], *tokens_of(filler, PREFIX + " there")),
        *(MARKS["fim_suf"], *tokens_of(filler, SUFFIX), MARKS["fim_mid"]),
    ]
    extra = [
        *(rep, *tokens_of(filler, "repository\n"), sep, *tokens_of(filler, "cat.txt\nA cat sat.\n")),
        *(sep, *tokens_of(filler, "dog.txt\nA dog ran.\n"), sep, *tokens_of(filler, "current\n")),
    ]
    asked = {"model": "reader", "input_prefix": PREFIX, "prompt": " there", "input_suffix": SUFFIX}
    told = answered(filler, "/infill", **asked, input_extra=files)
    assert told["content"] == answered(filler, "/completion", model="reader", prompt=[1, *extra, *gap])["content"]
    assert told["tokens_evaluated"] == 1 + len(extra) + len(gap)
    alone = answered(filler, "/infill", **asked, input_extra=[])
    assert alone["tokens_evaluated"] == 1 + len(gap)
    plain = [*tokens_of(filler, "cat.txt\nA cat sat.\n"), *tokens_of(filler, "dog.txt\nA dog ran.\n")]
    without = answered(filler, "/infill", **asked | {"model": "filler"}, input_extra=files)
    assert without["tokens_evaluated"] == 1 + len(plain) + len(gap)


def test_files_that_do_not_fit_are_left_out_oldest_first(filler: Any) -> None:
    asked = {"model": "reader", "input_prefix": PREFIX, "input_suffix": SUFFIX}
    last = {"filename": "last.txt", "text": "It ends well."}
    long = {"filename": "long.txt", "text": "A cat sat on a mat. " * 100}
    alone = answered(filler, "/infill", **asked, input_extra=[last])
    both = answered(filler, "/infill", **asked, input_extra=[{"filename": "first.txt", "text": "Hi"}, long, last])
    assert both["content"] == alone["content"] and both["tokens_evaluated"] == alone["tokens_evaluated"]
    none = answered(filler, "/infill", **asked, input_extra=[long])
    assert none["content"] == answered(filler, "/infill", **asked)["content"]


def of_plugins(**fields: Any) -> dict[str, Any]:
    """What llama.vim and llama.vscode send with every gap."""
    return {
        "id_slot": 0,
        "input_prefix": PREFIX,
        "input_suffix": SUFFIX,
        "input_extra": [],
        "prompt": "",
        "n_predict": 8,
        "stop": [],
        "n_indent": 0,
        "top_k": 40,
        "top_p": 0.9,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 100_000,
        "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "tokens_cached", "truncated"],
        **fields,
    }


def test_what_plugins_of_editors_send(filler: Any, middle: str) -> None:
    told = httpx.post(f"{filler.url}/infill", json={"model": "filler"} | of_plugins(), timeout=PATIENCE_S).json()
    assert told.keys() == {"content", "timings/prompt_n", "timings/predicted_n", "tokens_cached", "truncated"}
    assert told["content"] == middle and told["timings/predicted_n"] == 8 and not told["truncated"]
    # Before a gap is due, they have texts of other files computed.
    ahead = of_plugins(n_predict=0, temperature=0.0, samplers=[], t_max_predict_ms=1, response_fields=[""])
    assert httpx.post(f"{filler.url}/infill", json={"model": "filler"} | ahead, timeout=PATIENCE_S).json() == {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_with_less_indentation_ends_a_gap(filler: Any, stream: bool) -> None:
    """A grammar makes the model write the lines."""
    lines = 'root ::= "a\\n   b\\n\\n  c\\n d"'
    body = {"model": "filler", "prompt": PREFIX, "grammar": lines, "temperature": 0, "stream": stream}

    def written(**fields: Any) -> tuple[str, str]:
        text = httpx.post(f"{filler.url}/completion", json=body | fields, timeout=PATIENCE_S).text
        told = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
        return "".join(one["content"] for one in told), told[-1]["stop_type"]

    assert written()[0] == "a\n   b\n\n  c\n d"
    assert written(n_indent=1)[0] == "a\n   b\n\n  c\n d"
    assert written(n_indent=2) == ("a\n   b\n\n  c", "word")
    assert written(n_indent=3) == ("a\n   b\n", "word")


def test_the_first_line_break_after_the_time_limit_ends_an_answer(filler: Any) -> None:
    asked = {"model": "filler", "prompt": PREFIX, "grammar": 'root ::= "a" ("b"* "\\n")+', "n_predict": 400}
    told = answered(filler, "/completion", **asked, t_max_predict_ms=1, logit_bias=[["\n", 100.0]])
    assert told["stop_type"] == "limit" and told["content"].endswith("\n") and told["tokens_predicted"] < 400


def test_infill_tells_its_load_and_its_progress(filler: Any) -> None:
    httpx.post(f"{filler.url}/api/generate", json={"model": "filler", "keep_alive": 0}, timeout=PATIENCE_S)
    eventually(lambda: "filler" not in httpx.get(f"{filler.url}/api/ps", timeout=PATIENCE_S).text)
    body = {"model": "filler", "input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 2}
    asked = body | {"stream": True, "progress": True}
    lines = httpx.post(f"{filler.url}/infill", json=asked, timeout=PATIENCE_S).text.splitlines()
    told = [json.loads(line.removeprefix("data: ")).get("progress", {}) for line in lines if line]
    assert "phase" in told[0] and any("queue_position" in progress for progress in told)


def test_names_of_the_marks_are_text(filler: Any, middle: str) -> None:
    """A prefix that spells a control token's name must not act as one."""
    body = {"model": "filler", "input_prefix": "</s>" + PREFIX, "temperature": 0, "n_predict": 1}
    told = httpx.post(f"{filler.url}/infill", json=body | {"input_suffix": SUFFIX}, timeout=PATIENCE_S).json()
    plain = httpx.post(
        f"{filler.url}/tokenize", json={"model": "filler", "content": "</s>" + PREFIX}, timeout=PATIENCE_S
    ).json()["tokens"]
    assert 2 not in plain and told["tokens_evaluated"] > len(plain)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "What is it?", "images": [PICTURE]}]}),
        ("/api/generate", {"prompt": "What is it?", "images": [PICTURE]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [DATA_URL]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [BLOCK]}]}),
    ],
)
def test_pictures_are_refused_with_the_reason(filler: Any, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(filler.url + path, json={"model": "filler", **body}, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert ("does not fetch images" if "http://x" in str(body) else "reads text only") in answer.text
