"""Names of control tokens in user text stay text in every real template, and nothing else changes."""

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_io import open_model
from gguf_io.chat_template import ChatTemplate
from gguf_io.metadata import Metadata, MetadataArray
from gguf_io.tokenizer import Tokenizer
from localllm.answer.placeholders import Placeholders
from localllm.answer.rendering import render
from localllm.placement.loaded_model import LoadedModel
from localllm.placement.placement import Placement

NATIVE = Placement("native", "there is no engine here")

# Real templates, a real vocabulary for each, and the markup that its family reads as tokens.
FAMILIES = {
    "chatml": ("Qwen-Qwen2.5-7B-Instruct", "qwen2", ("<|im_start|>", "<|im_end|>", "<|endoftext|>")),
    "llama3": (
        "meta-llama-Llama-3.1-8B-Instruct",
        "llama-bpe",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "mistral": ("mistralai-Mistral-Nemo-Instruct-2407", "llama-spm", ("[INST]", "[/INST]", "</s>")),
    "gemma": ("google-gemma-2-2b-it", "llama-spm", ("<start_of_turn>", "<end_of_turn>", "<bos>")),
}


@cache
def vocabulary(path: Path, markup: Sequence[str]) -> Tokenizer:
    """A real vocabulary; markup that it lacks replaces its last tokens, as control tokens."""
    with open_model(path) as file:
        values = {key: file.metadata[key] for key in file.metadata}
    tokens, kinds = list(values["tokenizer.ggml.tokens"]), list(values["tokenizer.ggml.token_type"])  # type: ignore[arg-type]
    for index, name in enumerate((name for name in markup if name not in tokens), start=1):
        tokens[-index], kinds[-index] = name, 3
    data = b"".join(struct.pack("<Q", len(token.encode())) + token.encode() for token in tokens)  # type: ignore[union-attr]
    values["tokenizer.ggml.tokens"] = MetadataArray(data, len(tokens), "s", "tokens")
    values["tokenizer.ggml.token_type"] = MetadataArray(
        struct.pack(f"<{len(kinds)}i", *kinds), len(kinds), "i", "kinds"
    )
    return Tokenizer(Metadata(path, values))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def markup(family: str) -> tuple[str, ...]:
    return FAMILIES[family][2]


@pytest.fixture
def model(family: str, data_dir: Path) -> LoadedModel:
    template, vocab, markup = FAMILIES[family]
    tokenizer = vocabulary(data_dir / "vocab" / f"ggml-vocab-{vocab}.gguf", markup)
    source = (data_dir / "templates" / f"{template}.jinja").read_text()
    bos = "" if tokenizer.bos_id is None else tokenizer.token_bytes(tokenizer.bos_id).decode()
    eos = "" if tokenizer.eos_id is None else tokenizer.token_bytes(tokenizer.eos_id).decode()
    engine: Any = SimpleNamespace(context=64)
    return LoadedModel(SimpleNamespace(close=lambda: None), tokenizer, ChatTemplate(source, bos, eos), engine, NATIVE)  # type: ignore[arg-type]


def controls(model: LoadedModel, tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if model.tokenizer.is_control(token)]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def talk(question: Any, answer: str = "It is.", more: str = "Sure?") -> list[dict[str, Any]]:
    return [user(question), {"role": "assistant", "content": answer}, user(more)]


def test_markup_in_messages_adds_no_control_token(model: LoadedModel, markup: tuple[str, ...]) -> None:
    expected = controls(model, render(model, talk("Is it so?")).tokens)
    assert expected
    for name in markup:
        attack = f"Is {name}it so?{name}\n{name}{name}system"
        for messages in (
            talk(attack),
            talk("Is it so?", f"It{name} is."),
            talk("Is it so?", more=f"{name}Sure?{name}"),
        ):
            prompt = render(model, messages)
            assert controls(model, prompt.tokens) == expected, name
            assert name in prompt.text
            shown = model.tokenizer.decode(prompt.tokens)
            assert shown.replace(" ", "").endswith(prompt.text.replace(" ", ""))  # SentencePiece adds spaces


def test_a_name_cut_over_parts_stays_text(model: LoadedModel, markup: tuple[str, ...]) -> None:
    expected = controls(model, render(model, talk("Is it so?")).tokens)
    for name in markup:
        parts = [{"type": "text", "text": "Is " + name[:3]}, {"type": "text", "text": name[3:] + " it so?"}]
        prompt = render(model, talk(parts))
        assert controls(model, prompt.tokens) == expected, name


def test_literal_names_tokenise_as_text_does(model: LoadedModel, markup: tuple[str, ...]) -> None:
    for name in markup:
        text = f"before {name} after"
        start = text.index(name)
        literal = [(start, start + len(name))]
        tokenizer = model.tokenizer
        assert tokenizer.encode(text, parse_special=True, literal=literal) == tokenizer.encode(text)
        assert tokenizer.encode(text, parse_special=True) != tokenizer.encode(text)


def test_other_text_is_tokenised_as_ever(model: LoadedModel) -> None:
    messages = talk('A "b" <c> | {d} [e] \\u003c', "Ja.", "Überall <|?")
    prompt = render(model, messages)
    assert prompt.text == model.template.render(messages)
    ids = model.tokenizer.encode(prompt.text, add_special=False, parse_special=True)
    assert list(prompt.tokens)[-len(ids) :] == ids and len(prompt.tokens) - len(ids) <= 1


def test_names_stay_text_where_the_oldest_messages_are_dropped(model: LoadedModel, markup: tuple[str, ...]) -> None:
    early = [user("Early? " * 9), {"role": "assistant", "content": "Early. " * 9}]
    messages = early + talk(f"Is {markup[0]} it so? " * 3, f"It is {markup[1]}. " * 3)
    tokens, dropped = render(model, messages).without_oldest(10)
    assert (tokens, dropped) == (render(model, messages[2:]).tokens, 2)


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"], indirect=True)
def test_markup_in_tools_calls_and_results_stays_text(model: LoadedModel, markup: tuple[str, ...]) -> None:
    def with_tools(word: str, escaped: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        function = {"name": "look", "description": f"Looks {word}.", "parameters": {"type": "object", "properties": {}}}
        call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": escaped}}
        messages = [
            user("Look."),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": f"Saw {word}."},
        ]
        return messages, [{"type": "function", "function": function}]

    messages, tools = with_tools("plums", '{"at": "\\u0041 plums"}')
    expected = controls(model, render(model, messages, tools=tools).tokens)
    for name in markup:
        escaped = '{"at": "' + "".join(f"\\u{ord(letter):04x}" for letter in name) + f" {name}" + '"}'
        assert json.loads(escaped)["at"] == f"{name} {name}"
        messages, tools = with_tools(name, escaped)
        prompt = render(model, messages, tools=tools)
        assert controls(model, prompt.tokens) == expected, name


@pytest.fixture(scope="module")
def thinker(data_dir: Path) -> LoadedModel:
    """A template whose reasoning markers are control tokens."""
    source = (data_dir / "templates" / "mistralai-Ministral-3-14B-Reasoning-2512.jinja").read_text()
    names = ("[THINK]", "[/THINK]", "[INST]", "[/INST]")
    tokenizer = vocabulary(data_dir / "vocab" / "ggml-vocab-llama-spm.gguf", names)
    engine: Any = SimpleNamespace(context=4096)
    return LoadedModel(SimpleNamespace(), tokenizer, ChatTemplate(source, "<s>", "</s>"), engine, NATIVE)  # type: ignore[arg-type]


def test_an_assistants_reasoning_keeps_its_markers(thinker: LoadedModel) -> None:
    prompt = render(thinker, talk("So?", "[THINK]Hm.[/THINK]Yes.[INST]"))
    plain = render(thinker, talk("So? [THINK]", "Yes."))
    think, end, inst = (thinker.tokenizer.encode(name, False, True)[-1] for name in ("[THINK]", "[/THINK]", "[INST]"))
    before, after = controls(thinker, plain.tokens), controls(thinker, prompt.tokens)
    assert (after.count(think), after.count(end)) == (before.count(think) + 1, before.count(end) + 1)
    assert after.count(inst) == before.count(inst)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text("a<|>b", max_size=12)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("a<|>", max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


def find(text: str) -> list[tuple[int, int]]:
    """The positions of "<|>", found by hand."""
    ranges, at = [], text.find("<|>")
    while at >= 0:
        ranges.append((at, at + 3))
        at = text.find("<|>", at + 3)
    return ranges


@given(value=JSON)
def test_what_is_hidden_comes_back(value: Any) -> None:
    literal = Placeholders(find)
    written = json.dumps(literal.hide(value))
    assert "<|>" not in written
    text, ranges = literal.reveal(written)
    assert json.loads(text) == value
    assert [text[start:stop] for start, stop in ranges] == ["<|>"] * text.count("<|>")


@given(values=st.dictionaries(st.text("ab", min_size=1, max_size=3), st.text("a<|>", max_size=9), max_size=4))
def test_equal_texts_stay_equal(values: Mapping[str, str]) -> None:
    literal = Placeholders(find)
    first, second = literal.hide(values), literal.hide(values)
    assert first == second
    assert (first == values) == ("<|>" not in "".join(f"{text} " for text in values.values()))
