"""The chat template of a model file: the one it brings, or a default by family."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gguf_io.chat_template.defaults import family_of
from gguf_io.chat_template.template import ChatTemplate
from gguf_io.errors import TemplateError

_KEY = "tokenizer.chat_template"


class HasMetadata(Protocol):
    """An open model file, or anything with its key-value section."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


def load_chat_template(model: HasMetadata | str | Path, source: str | None = None) -> ChatTemplate:
    """The template in `tokenizer.chat_template`, and in `tokenizer.chat_template.tool_use` for requests with tools.

    A file without one gets the default of its family, see `defaults`; then `is_default` is true and `warning` says so.
    source: a Jinja template that is used instead of all of these.
    Raises ModelFileError for a path that is no model, TemplateError for a template that is no text or too long.
    """
    if isinstance(model, str | Path):
        from gguf_io.model_file import open_model  # not above: the sandbox imports this package without NumPy

        with open_model(model) as opened:
            return load_chat_template(opened, source)
    metadata = model.metadata
    listed = metadata.get("tokenizer.ggml.tokens")
    tokens = listed if isinstance(listed, Sequence) and not isinstance(listed, str) else ()
    bos_token = _token_text(metadata, tokens, "tokenizer.ggml.bos_token_id")
    eos_token = _token_text(metadata, tokens, "tokenizer.ggml.eos_token_id")
    if source:
        return ChatTemplate(source, bos_token, eos_token)
    source = _text(metadata, _KEY)
    if source:
        return ChatTemplate(source, bos_token, eos_token, tool_use_source=_text(metadata, f"{_KEY}.tool_use"))
    family = family_of(frozenset(tokens), str(metadata.get("general.name", "")))
    return ChatTemplate(
        family.source(),
        bos_token,
        eos_token,
        warning=f"this model file brings no chat template; messages are written as {family.description}, "
        "which a model that was trained on another form answers badly",
        stop_strings=family.stop_strings,
    )


def _token_text(metadata: Mapping[str, Any], tokens: Any, key: str) -> str:
    """The token that `key` names; "" for none and for ids outside the vocabulary, which old files use for none."""
    index = metadata.get(key)
    return str(tokens[index]) if isinstance(index, int) and 0 <= index < len(tokens) else ""


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise TemplateError(f"{key} in the model file is not text")
    return value
