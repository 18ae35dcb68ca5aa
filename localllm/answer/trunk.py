"""How much of a prompt is its trunk: system text and tools, which every conversation of a program begins with."""

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from gguf_io.errors import TemplateError
from localllm.answer.placeholders import has_images
from localllm.answer.rendering import render
from localllm.answer.request import SYSTEM_ROLES, Message
from localllm.engine.loaded_model import LoadedModel
from localllm.engine.prefix_cache import common_prefix

log = logging.getLogger(__name__)

# Shorter ones are computed again in no time.
LEAST_CHARACTERS = 2000
MOST_KEPT = 16
# A conversation of these two parts shows where its system text and tools end.
_STAND_IN = {"role": "user", "content": "."}


def trunk_length(
    model: LoadedModel, messages: Sequence[Message], tokens: Sequence[int], options: Mapping[str, Any]
) -> int:
    """How many of a prompt's tokens are its trunk; 0 for one too short to be worth it.

    tokens: of the messages as rendering.render renders them with these options. Where a template puts what is volatile
    among system text and tools, such as the time, the trunk ends there. The model keeps the last trunks.
    """
    head = list(takewhile(lambda message: message.get("role") in SYSTEM_ROLES, messages))
    key = json.dumps([head, options], default=repr)
    if len(key) < LEAST_CHARACTERS or has_images(head):
        return 0
    if (kept := model.trunks.get(key)) is None:
        try:
            kept = render(model, [*head, _STAND_IN], **options).tokens
        except TemplateError as error:  # of a template that takes other conversations only
            log.info("The end of system text and tools is not known: %s", error)
            return 0
        model.trunks[key] = kept
        while len(model.trunks) > MOST_KEPT:
            model.trunks.pop(next(iter(model.trunks)), None)
    return common_prefix(kept, tokens)
