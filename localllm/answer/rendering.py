"""Renders conversations as prompts, optionally without their oldest messages, and finds their shared prefix."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from gguf_io.chat_template import ChatTemplate
from gguf_io.chat_template.messages import SYSTEM_ROLES
from gguf_io.errors import PictureError, TemplateError
from gguf_io.image_rows import ReadPicture
from gguf_io.pictures import Budget
from gguf_io.tokenizer import Tokenizer
from localllm.answer.harmony import before_answer
from localllm.answer.placeholders import Placeholders, Range, has_images, images_of
from localllm.answer.request import Message
from localllm.engine.prefix_cache import common_prefix
from localllm.placement.loaded_model import LoadedModel

log = logging.getLogger(__name__)

# Of shared prefixes: shorter ones are quick to compute again.
LEAST_CHARACTERS = 2000
MOST_KEPT = 16
# Rendered after system text and tools, it shows where they end.
_STAND_IN = {"role": "user", "content": "."}
LOW_DETAIL_TOKENS = 128
MARKUP_CHARACTERS = 30  # a guess at a message's markup


def render(
    model: LoadedModel,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    enable_thinking: bool | None = None,
    continues: bool = False,
    namespace: str = "",
    image_tokens: tuple[int | None, int | None] = (None, None),
    **extra: Any,
) -> "RenderedChat":
    """Render and tokenise a conversation for the assistant's answer.

    messages, tools: see AnswerRequest. continues: the answer continues the last message. namespace: users of others do
    not share encoded images. image_tokens: the least and the most of an image, None for the settings'. extra: of the
    template's EXTRA_ARGUMENTS. Raises TemplateError, RequestError if the model cannot read images, PictureError for a
    bad image or budget.
    """
    options = {"tools": tools or None, "enable_thinking": enable_thinking, **extra}

    def see(part: Mapping[str, Any]) -> ReadPicture:
        return model.see(part["data"], budget_of(part.get("detail"), image_tokens, model), namespace)

    newest = images_of(messages[-1:])
    if len(newest) > 1:  # the last message is never left out, so it must fit; a single image is refused when it is seen
        budgets = [budget_of(part.get("detail"), image_tokens, model) for part in newest]
        pairs = zip(newest, budgets, strict=True)
        tokens = sum(model.image_tokens(part["data"], budget, namespace) for part, budget in pairs)
        if tokens >= (context := model.engine.context):
            raise PictureError(
                f"The {len(newest)} images of the last message take {tokens:,} tokens, more than the context of "
                f"{context:,}. Lower image_max_tokens, or send fewer.",
                too_long=(tokens, context),
            )
    return RenderedChat(model.tokenizer, model.template, messages, options, see, continues)


def budget_of(detail: object, given: tuple[int | None, int | None], model: LoadedModel) -> Budget:
    """What an image may cost: as its part says, else as the request, else as the settings. Raises PictureError."""
    if detail == "low":
        return Budget(most_tokens=LOW_DETAIL_TOKENS)
    if detail == "high":
        return Budget(most_tokens=max(model.engine.context // 2, 1))
    (least, most), usual = given, model.image_budget
    if least is None and (most is None or most >= (usual.least_tokens or 0)):
        least = usual.least_tokens
    if most is None and (least is None or least <= (usual.most_tokens or least)):
        most = usual.most_tokens
    return Budget(least, most)


class RenderedChat:
    """A conversation rendered and tokenised for the assistant's answer. Implements engine.request.Conversation.

    Only the template's own text is parsed for control tokens. Their names in messages and options stay text, except
    reasoning markers in an assistant's content. text, tokens: of the whole prompt. length: tokens of its messages; the
    rest is the beginning of the answer. images: rows by their first id. views: what the model sees of each image.
    starts_in_reasoning: whether the answer does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        see: Callable[[Mapping[str, Any]], ReadPicture] | None = None,
        continues: bool = False,
    ) -> None:
        """options: of ChatTemplate.render. see: encodes an image. continues: the answer continues the last message.

        Raises TemplateError, and what see raises.
        """
        self._tokenizer = tokenizer
        self._template = template
        markers = [text for pair in template.reasoning_markers for text in pair]
        self._placeholders = Placeholders(tokenizer.markup, markers, see)
        hidden = self._placeholders.hide_messages(messages)
        self._messages = hidden[:-1] if continues else hidden
        self._options = {name: self._placeholders.hide(value) for name, value in options.items()}
        self._shorter: dict[int, tuple[int, ...]] = {}
        rendered = self._render(self._messages)
        self.text, self.tokens = self._encode(rendered)
        self.length = len(self.tokens)
        self.starts_in_reasoning = template.starts_in_reasoning(rendered)
        self.images, self.views = self._placeholders.rows, self._placeholders.views
        if continues:
            self._begin(hidden[-1])

    def _begin(self, message: Mapping[str, Any]) -> None:
        """Add an assistant's unfinished message to the prompt."""
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("thinking")
        markers = self._template.reasoning_markers
        alone, joined = before_answer(markers)
        if reasoning and markers:
            opening, closing = markers[0]
            written = ("" if self.starts_in_reasoning else opening) + reasoning
            written += closing + joined + content if content else ""
            self.starts_in_reasoning = not content
        else:
            written = alone + content if content else ""
            self.starts_in_reasoning = self.starts_in_reasoning and not content
        text, tokens = self._placeholders.encode(written, self._ids)
        self.text, self.tokens = self.text + text, self.tokens + tokens

    def without_oldest(self, tokens: int) -> tuple[tuple[int, ...], int]:
        """Drop the oldest messages to save at least this many tokens; returns the tokens and the messages dropped.

        After the messages of SYSTEM_ROLES, the rest starts with a user's message, at the latest the newest one.
        If even that is too long, it is returned anyway. Raises TemplateError.
        """
        starts = self._starts()
        if not starts:
            return self.tokens[: self.length], 0
        first = starts[self._find_cut(starts, tokens)]
        return self._from(first), len(self._messages) - len(self._kept(first))

    def _starts(self) -> list[int]:
        """The indices at which a shorter conversation may start: the user's messages."""
        return [at for at, message in enumerate(self._messages) if at and message.get("role") == "user"]

    def _find_cut(self, starts: Sequence[int], tokens: int) -> int:
        """The index of the first start that saves enough tokens, else the last. A good first guess saves renderings."""
        low, high, step = 0, len(starts) - 1, 1
        at = min(self._guess(starts, tokens), max(high - 1, 0))
        while low < high:
            if self.length - len(self._from(starts[at])) >= tokens:
                high, beyond = at, at - step
            else:
                low, beyond = at + 1, at + step
            at = beyond if low <= beyond < high else (low + high) // 2
            step *= 2
        return low

    def _guess(self, starts: Sequence[int], tokens: int) -> int:
        """The index of the start, assuming the same number of tokens per character in every message."""
        sizes = list(accumulate(MARKUP_CHARACTERS + len(str(message.get("content"))) for message in self._messages))
        wanted = tokens / max(self.length, 1) * sizes[-1]
        return sum(sizes[first - 1] < wanted for first in starts)

    def _from(self, first: int) -> tuple[int, ...]:
        if first not in self._shorter:
            self._shorter[first] = self._encode(self._render(self._kept(first)))[1]
        return self._shorter[first]

    def _kept(self, first: int) -> list[Any]:
        messages = enumerate(self._messages)
        return [message for at, message in messages if at >= first or message.get("role") in SYSTEM_ROLES]

    def _render(self, messages: Sequence[Any]) -> str:
        return self._template.render(messages, **self._options)

    def _encode(self, rendered: str) -> tuple[str, tuple[int, ...]]:
        """Text and token ids, with exactly one BOS if the model expects it."""
        text, ids = self._placeholders.encode(rendered, self._ids)
        bos = self._tokenizer.bos_id
        wants_bos = self._tokenizer.add_bos and bos is not None and ids[:1] != (bos,)
        return text, (bos, *ids) if wants_bos and bos is not None else ids

    def _ids(self, text: str, literal: Sequence[Range]) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=True, literal=literal)


def shared_prefix_length(
    model: LoadedModel, messages: Sequence[Message], tokens: Sequence[int], options: Mapping[str, Any]
) -> int:
    """How many of a prompt's tokens other conversations share with it; 0 if they are too few to be worth a place.

    That is the system text and tools with which every conversation of a program begins. tokens: of the messages as
    `render` encodes them with these options. The shared prefix ends where a template writes something volatile, such as
    the time. The model caches the last MOST_KEPT shared prefixes.
    """
    head = list(takewhile(lambda message: message.get("role") in SYSTEM_ROLES, messages))
    key = json.dumps([head, options], default=repr)
    if len(key) < LEAST_CHARACTERS or has_images(head):
        return 0
    if (kept := model.shared_prefixes.get(key)) is None:
        try:
            kept = render(model, [*head, _STAND_IN], **options).tokens
        except TemplateError as error:  # the template rejects such a conversation
            log.info("The end of system text and tools is not known: %s", error)
            return 0
        model.shared_prefixes[key] = kept
        while len(model.shared_prefixes) > MOST_KEPT:
            model.shared_prefixes.pop(next(iter(model.shared_prefixes)), None)
    return common_prefix(kept, tokens)


def shared_length(
    model: LoadedModel, beginning: Sequence[Message], tokens: Sequence[int], options: Mapping[str, Any]
) -> int:
    """How many of a prompt's tokens belong to the messages of its beginning; 0 if that is not known.

    tokens, options: as for shared_prefix_length. Images are not encoded again, so a beginning with images is not known.
    """
    if has_images(beginning):
        return 0
    only_system = all(message.get("role") in SYSTEM_ROLES for message in beginning)
    try:
        rendered = render(model, [*beginning, _STAND_IN] if only_system else beginning, **options)
    except TemplateError as error:
        log.info("The end of the text to pin is not known: %s", error)
        return 0
    return common_prefix(rendered.tokens, tokens)
