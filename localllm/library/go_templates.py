"""Go chat templates, as in Ollama's manifests, recognised by the text that they write.

A Go template is not run: it is recognised by its literal text. One that writes only what a known family writes is
replaced by that family's Jinja template. One that writes the family's markers and more, such as instructions for
tools, is replaced by the model file's own template if that is of the same family. All others are refused.
"""

# ruff: noqa: RUF001 - DeepSeek's tokens are made of such characters

import re
from dataclasses import dataclass

from gguf_io.chat_template.defaults import FAMILIES, INSTRUCT, DefaultTemplate
from localllm.library.errors import LibraryError

_MARKER = re.compile(r"<\|?[^<>\s|]+\|?>|<｜[^<>\s]+｜>|<<[^<>\s]+>>|\[/?[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class GoFamily:
    """The text that templates of a family may write: its markers, other harmless ones, and role names."""

    family: DefaultTemplate
    also: frozenset[str]
    words: frozenset[str]


_BY_NAME = {family.name: family for family in (*FAMILIES, INSTRUCT)}
_ROLES = frozenset({"system", "user", "assistant"})
GO_FAMILIES = (
    GoFamily(_BY_NAME["chatml"], frozenset(), _ROLES),
    GoFamily(_BY_NAME["llama3"], frozenset({"<|begin_of_text|>"}), _ROLES),
    GoFamily(_BY_NAME["gemma"], frozenset({"<bos>"}), frozenset({"user", "model"})),
    GoFamily(_BY_NAME["deepseek"], frozenset({"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"}), frozenset()),
    GoFamily(_BY_NAME["phi3"], frozenset({"<|system|>", "<|endoftext|>"}), frozenset()),
    GoFamily(_BY_NAME["instruct"], frozenset({"<s>", "</s>"}), frozenset()),
)


def is_jinja(template: str) -> bool:
    """Whether a template is already Jinja; Go templates have no {% %}."""
    return "{%" in template


def jinja_of(template: str, own: str | None) -> str | None:
    """The Jinja template that replaces a manifest's; `own` for one without literal text, such as {{ .Prompt }}.

    own: the template in the model file, if there is one. Raises LibraryError for a template of no known family.
    """
    if is_jinja(template):
        return template
    text = _literal_text(template)
    if not text.strip():
        return own
    family = next((known for known in GO_FAMILIES if all(token in text for token in known.family.tokens)), None)
    if family is None:
        raise LibraryError(
            "The chat template is written in Go's language and is not of a known family "
            f"({', '.join(known.family.name for known in GO_FAMILIES)}). Write it in Jinja, or leave it out."
        )
    if _writes_nothing_else(text, family):
        return family.family.source()
    if own is not None and all(token in own for token in family.family.tokens):
        return own
    raise LibraryError(
        f"The chat template is written in Go's language, of the family {family.family.name}, but writes more, "
        "and the model file has no template of this family. Write it in Jinja, or leave it out."
    )


def _literal_text(template: str) -> str:
    """The text outside of a template's actions {{ }}. One pass: a lazy regular expression would be quadratic."""
    kept, at = [], 0
    while (opened := template.find("{{", at)) >= 0 and (closed := template.find("}}", opened + 2)) >= 0:
        kept.append(template[at:opened])
        at = closed + 2
    return "".join([*kept, template[at:]])


def _writes_nothing_else(text: str, known: GoFamily) -> bool:
    markers = set(_MARKER.findall(text))
    words = set(_MARKER.sub(" ", text).split())
    return markers <= {*known.family.tokens, *known.also} and words <= known.words
