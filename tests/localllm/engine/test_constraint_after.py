"""Constraints that start after a section of free text, such as reasoning."""

import json
from pathlib import Path

import pytest

from gguf_io import load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from localllm.answer.harmony import ANALYSIS, before_answer
from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.errors import RequestError
from tests.fakes.byte_vocabulary import ByteVocabulary

SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
)
TEXT = ("<think>", "</think>")
CONTROL = ("<｜fim▁begin｜>", "<｜fim▁end｜>")  # noqa: RUF001 - tokens of deepseek-coder's vocabulary


@pytest.fixture(scope="module", params=["gpt-2", "llama-spm", "qwen2"])
def tokenizer(data_dir: Path, request: pytest.FixtureRequest) -> Tokenizer:
    with open_model(data_dir / "vocab" / f"ggml-vocab-{request.param}.gguf") as file:
        return load_tokenizer(file)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> ConstraintVocabulary:
    return ConstraintVocabulary(tokenizer)


def feed(constraint: Constraint, tokenizer: Tokenizer, text: str) -> None:
    """Accept a text in the middle of others; the mask must allow each of its tokens."""
    lead = len(tokenizer.encode("\n", add_special=False))
    for token in tokenizer.encode("\n" + text, add_special=False, parse_special=True)[lead:]:
        assert constraint.mask()[token], tokenizer.token_bytes(token)
        constraint.accept(token)


@pytest.mark.parametrize("kind", [ConstraintKind.JSON, ConstraintKind.JSON_SCHEMA])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("between", ["", "\n\n"])
def test_free_text_then_the_format(
    tokenizer: Tokenizer, vocabulary: ConstraintVocabulary, kind: ConstraintKind, opened: bool, between: str
) -> None:
    source = SCHEMA if kind is ConstraintKind.JSON_SCHEMA else ""
    constraint = compile_constraint(kind, source, vocabulary, ("" if opened else TEXT[0], TEXT[1]))
    feed(constraint, tokenizer, "" if opened else TEXT[0])
    feed(constraint, tokenizer, 'Is it {"a": 1}, or <b>? Hm… é </thin </ think>\n')
    assert not constraint.is_complete and not constraint.mask()[sorted(tokenizer.eog_ids)].any()
    feed(constraint, tokenizer, TEXT[1] + between + '{"a": 17}')
    assert constraint.is_complete and constraint.is_finished


def test_control_tokens_open_and_close(data_dir: Path) -> None:
    with open_model(data_dir / "vocab" / "ggml-vocab-deepseek-coder.gguf") as file:
        tokenizer = load_tokenizer(file)
    opening, closing = (tokenizer.encode(mark, add_special=False, parse_special=True) for mark in CONTROL)
    assert len(opening) == len(closing) == 1 and tokenizer.is_control(closing[0])
    constraint = compile_constraint(ConstraintKind.JSON_SCHEMA, SCHEMA, ConstraintVocabulary(tokenizer), CONTROL)
    assert constraint.mask().nonzero()[0].tolist() == opening
    feed(constraint, tokenizer, CONTROL[0])
    feed(constraint, tokenizer, "thoughts of </think> and <|fim|>")
    assert constraint.mask()[closing[0]] and not constraint.mask()[opening[0]]
    feed(constraint, tokenizer, CONTROL[1] + '\n\n{"a": 5}')
    assert constraint.is_finished


class HarmonyVocabulary(ByteVocabulary):
    """A vocabulary of bytes and gpt-oss's control tokens."""

    NAMES = (b"<|start|>", b"<|channel|>", b"<|message|>", b"<|end|>")

    def __init__(self) -> None:
        super().__init__(self.NAMES)

    def is_control(self, token: int) -> bool:
        return super().is_control(token) or self.tokens[token] in self.NAMES

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        return b"" if skip_special and self.is_control(token) else super().token_bytes(token)


def test_the_answer_begins_in_its_channel() -> None:
    """In gpt-oss's harmony format, a header of several control tokens separates reasoning and answer."""
    source = HarmonyVocabulary()
    _, joined = before_answer([(ANALYSIS, "<|end|>")])
    constraint = compile_constraint(
        ConstraintKind.JSON_SCHEMA, SCHEMA, ConstraintVocabulary(source), (ANALYSIS, "<|end|>" + joined)
    )

    def write(text: str) -> None:
        for token in source.encode(text):
            assert constraint.mask()[token], source.tokens[token]
            constraint.accept(token)

    write(ANALYSIS + "Is it {} or <b>?")
    text_and_end = constraint.mask().nonzero()[0]
    assert {source.tokens[token] for token in text_and_end if source.is_control(token)} == {b"<|end|>"}
    write("<|end|>")
    assert constraint.mask().nonzero()[0].tolist() == source.encode("<|start|>")
    write("<|start|>assistant<|channel|>final<|message|>")
    assert not constraint.mask()[source.encode("<|end|>")].any()
    write('{"a": 5}')
    assert constraint.is_finished


def test_the_opening_is_all_that_may_come_first(tokenizer: Tokenizer, vocabulary: ConstraintVocabulary) -> None:
    constraint = compile_constraint(ConstraintKind.JSON, "", vocabulary, TEXT)
    written = b""
    while forced := constraint.forced_tokens():
        for token in forced:
            constraint.accept(token)
            written += tokenizer.token_bytes(token)
    assert TEXT[0].encode().startswith(written) and written
    with pytest.raises(RequestError):
        constraint.accept(tokenizer.encode("x", add_special=False)[-1])


def test_what_comes_after_is_checked_like_any_other(vocabulary: ConstraintVocabulary) -> None:
    with pytest.raises(RequestError):
        compile_constraint(ConstraintKind.JSON_SCHEMA, '{"not": {}}', vocabulary, TEXT)
    with pytest.raises(RequestError):
        compile_constraint(ConstraintKind.REGEX, "(", vocabulary, TEXT)


def test_other_kinds_follow_too(tokenizer: Tokenizer, vocabulary: ConstraintVocabulary) -> None:
    for kind, source in ((ConstraintKind.REGEX, "[0-9]{2}"), (ConstraintKind.GBNF, 'root ::= "4" [0-9]')):
        constraint = compile_constraint(kind, source, vocabulary, TEXT)
        feed(constraint, tokenizer, "<think>x</think>")
        feed(constraint, tokenizer, "42")
        assert constraint.is_complete
