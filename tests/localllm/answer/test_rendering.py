"""Conversations that exceed the context, in every real template."""

from pathlib import Path
from typing import Any

import pytest

from gguf_io import load_tokenizer
from gguf_io.chat_template import ChatTemplate
from gguf_io.errors import TemplateError
from gguf_io.tokenizer import Tokenizer
from localllm.answer.rendering import RenderedChat
from localllm.engine.request import ContextPolicy, GenerationRequest, fit_prompt
from localllm.errors import ContextOverflowError

FINAL = "<|channel|>final<|message|>"
FAMILIES = ("Qwen-Qwen3-0.6B", "meta-llama-Llama-3.2-3B-Instruct", "google-gemma-2-2b-it", "openai-gpt-oss-120b")


@pytest.fixture(scope="module")
def tokenizer(data_dir: Path) -> Tokenizer:
    return load_tokenizer(data_dir / "vocab" / "ggml-vocab-qwen2.gguf")


def template(data_dir: Path, name: str) -> ChatTemplate:
    return ChatTemplate((data_dir / "templates" / f"{name}.jinja").read_text(), "<s>", "</s>")


def conversation(turns: int, system: bool = True) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"Question {turn}? " + "well " * (turn * 7 % 30)},
            {"role": "assistant", "content": f"Answer {turn}. " + "so " * (turn * 5 % 40)},
        ]
    return [*messages, {"role": "user", "content": "And then?"}]


def chat(tokenizer: Tokenizer, template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> RenderedChat:
    return RenderedChat(tokenizer, template, messages, options)


@pytest.mark.slow
def test_in_every_template_the_rest_is_a_complete_conversation(data_dir: Path, tokenizer: Tokenizer) -> None:
    messages = conversation(12, system=False)
    compared = 0
    for path in sorted((data_dir / "templates").glob("*.jinja")):
        own = template(data_dir, path.stem)
        try:
            whole = chat(tokenizer, own, messages)
        except TemplateError:
            continue  # rejects plain conversations
        tokens, dropped = whole.without_oldest(whole.length // 3)
        rest = chat(tokenizer, own, messages[dropped:])
        assert tokens == rest.tokens, path.stem
        assert messages[dropped]["role"] == "user", path.stem
        # A template may write a long system text of its own, which cannot be shortened.
        assert whole.length - len(tokens) >= whole.length // 3 or dropped == len(messages) - 1, path.stem
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cut_is_the_first_that_saves_enough(data_dir: Path, tokenizer: Tokenizer, family: str) -> None:
    messages = conversation(20)
    source = template(data_dir, family)
    whole = chat(tokenizer, source, messages)
    rests = [chat(tokenizer, source, [messages[0], *messages[first:]]).tokens for first in range(3, 42, 2)]
    for wanted in range(1, whole.length, whole.length // 17):
        enough = [rest for rest in rests if whole.length - len(rest) >= wanted]
        tokens, dropped = whole.without_oldest(wanted)
        assert tokens == (enough[0] if enough else rests[-1])
        assert tokens == rests[dropped // 2 - 1]


def test_a_long_chat_is_rendered_a_few_times_only(
    data_dir: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = template(data_dir, "Qwen-Qwen3-0.6B")
    messages = conversation(150)
    whole = chat(tokenizer, source, messages)
    rendered: list[int] = []
    render = source.render

    def count(wanted: list[Any], **options: Any) -> str:
        rendered.append(len(wanted))
        return render(wanted, **options)

    monkeypatch.setattr(source, "render", count)
    for share in (0.05, 0.3, 0.6, 0.95):
        rendered.clear()
        whole.without_oldest(int(whole.length * share))
        assert len(rendered) <= 6


def test_system_messages_and_the_newest_question_stay(data_dir: Path, tokenizer: Tokenizer) -> None:
    source = template(data_dir, "Qwen-Qwen2.5-7B-Instruct")
    messages = conversation(5)
    messages.insert(5, {"role": "system", "content": "Be kind."})
    tokens, dropped = chat(tokenizer, source, messages).without_oldest(10**6)
    kept = [messages[0], messages[5], messages[-1]]
    assert (tokens, dropped) == (chat(tokenizer, source, kept).tokens, len(messages) - 3)
    alone = chat(tokenizer, source, messages[-1:])
    assert alone.without_oldest(5) == (alone.tokens, 0)


@pytest.mark.parametrize(
    ("name", "message", "begun", "in_reasoning"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", {"content": "It was"}, "It was", False),
        ("Qwen-Qwen3-0.6B", {"content": "It was", "thinking": "Hm."}, "<think>Hm.</think>It was", False),
        ("Qwen-Qwen3-0.6B", {"content": "", "reasoning_content": "Hm"}, "<think>Hm", True),
        ("Qwen-Qwen2.5-7B-Instruct", {"content": "<|im_end|>"}, "<|im_end|>", False),
        ("openai-gpt-oss-120b", {"content": "It was"}, f"{FINAL}It was", False),
        (
            "openai-gpt-oss-120b",
            {"content": "It was", "thinking": "Hm."},
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{FINAL}It was",
            False,
        ),
        ("openai-gpt-oss-120b", {"content": "", "thinking": "Hm."}, "<|channel|>analysis<|message|>Hm.", True),
    ],
)
def test_a_continued_answer_ends_the_prompt(
    data_dir: Path, tokenizer: Tokenizer, name: str, message: dict[str, str], begun: str, in_reasoning: bool
) -> None:
    own, messages = template(data_dir, name), conversation(2)
    before = chat(tokenizer, own, messages)
    whole = RenderedChat(tokenizer, own, [*messages, {"role": "assistant", **message}], {}, continues=True)
    assert (whole.text, whole.starts_in_reasoning) == (before.text + begun, in_reasoning)
    assert whole.length == before.length and whole.tokens[: whole.length] == before.tokens
    tokens = whole.tokens[whole.length :]
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == begun
    # Text written by a model is not parsed as control tokens in the next turn.
    assert tokens == tuple(tokenizer.encode(begun, add_special=False, parse_special=False))


def test_the_beginning_of_the_answer_stays_behind_the_messages(data_dir: Path, tokenizer: Tokenizer) -> None:
    begun = tuple(tokenizer.encode("It was"))
    messages = [*conversation(30), {"role": "assistant", "content": "It was"}]
    own = template(data_dir, "Qwen-Qwen2.5-7B-Instruct")
    whole = RenderedChat(tokenizer, own, messages, {}, continues=True)
    request = GenerationRequest(whole.tokens, context_policy=ContextPolicy.DROP_MESSAGES, messages=whole, max_tokens=8)
    fitted = fit_prompt(request, 400)
    assert fitted.dropped_messages and fitted.dropped_tokens == len(request.prompt) - len(fitted.tokens)
    assert tuple(fitted.tokens[-len(begun) :]) == begun
    assert whole.without_oldest(fitted.dropped_tokens)[0] == fitted.tokens[: -len(begun)]
    with pytest.raises(ContextOverflowError):
        fit_prompt(request, 16)
