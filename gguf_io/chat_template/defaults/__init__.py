"""Templates for files without one, chosen by tokens that only one family of models has.

Control tokens that a model has never seen degrade its answers, so a family is recognised by its control tokens. Where
the vocabulary has none of them, the model's name identifies the older [INST] models; all others, base models included,
get lines of "Role: text".
"""

# ruff: noqa: RUF001 - DeepSeek's tokens are made of such characters

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DefaultTemplate:
    """One default: `name`.jinja beside this file, and the tokens that must all be in the vocabulary."""

    name: str
    tokens: tuple[str, ...]
    description: str
    stop_strings: tuple[str, ...] = ()

    def source(self) -> str:
        return Path(__file__).with_name(f"{self.name}.jinja").read_text("utf-8")


FAMILIES = (
    DefaultTemplate("chatml", ("<|im_start|>", "<|im_end|>"), "ChatML (Qwen, SmolLM, Hermes and others)"),
    DefaultTemplate("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "Llama 3"),
    DefaultTemplate("gemma", ("<start_of_turn>", "<end_of_turn>"), "Gemma"),
    DefaultTemplate("deepseek", ("<｜User｜>", "<｜Assistant｜>"), "DeepSeek"),
    DefaultTemplate("harmony", ("<|start|>", "<|channel|>", "<|message|>"), "harmony (gpt-oss)"),
    DefaultTemplate("phi3", ("<|user|>", "<|assistant|>", "<|end|>"), "Phi 3"),
)
INSTRUCT = DefaultTemplate("instruct", ("[INST]", "[/INST]"), "[INST] (Llama 2, Mistral)")
PLAIN = DefaultTemplate("plain", (), 'lines of "Role: text"', stop_strings=("\nUser:", "\nSystem:"))

# Substrings of a lower-case model name; the second follows the first.
_INSTRUCT_NAMES = (
    *((f"llama{between}2", "chat") for between in ("", "-", " ", "_")),
    *(("mistral", "instruct"), ("mixtral", "instruct")),
)


def family_of(tokens: Collection[str], model_name: str) -> DefaultTemplate:
    """The family whose control tokens the vocabulary has; by name for [INST] models, whose markers are plain text."""
    for family in (*FAMILIES, INSTRUCT):
        if all(token in tokens for token in family.tokens):
            return family
    name = model_name.lower()
    instructed = any(purpose in name.partition(family)[2] for family, purpose in _INSTRUCT_NAMES)
    return INSTRUCT if instructed else PLAIN
