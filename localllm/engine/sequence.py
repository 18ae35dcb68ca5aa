"""The tokens of one generation: who shares their KV, which of them are images, and how many are computed.

In a prompt's tokens an image is a run of ids far above the vocabulary, derived from a digest of its content, so that
the prefix cache works for images as for text. A run is computed and reused as a whole.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gguf_io.image_rows import ImageRows, ImageSpans
from gguf_io.runner_info import AdapterSet
from localllm.engine.pins import Pin
from localllm.errors import RequestError
from localllm.sampling import LARGEST_LORA_WEIGHT


class KeySpace(NamedTuple):
    """Requests of one space share the KV of common prefixes. Requests of different spaces never do."""

    adapters: AdapterSet = ()
    namespace: str = ""


class TokenSequence:
    """A prompt and the tokens generated after it.

    The runner's sequence `handle` (None while there is none) stores the first `computed` tokens; after a step also its
    drafts, until they are verified. Decoding is the case of one pending token, prefill that of many. space: requests in
    it share KV. background, persist, shared_prefix and pins are the request's.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        images: Mapping[int, ImageRows],
        space: KeySpace,
        background: bool = False,
        persist: bool = True,
        shared_prefix: int = 0,
        pins: Sequence[Pin] = (),
    ) -> None:
        self.tokens = list(prompt)
        self.images = ImageSpans(self.tokens, images)
        self.space = space
        self.background = background
        self.persist = persist
        self.shared_prefix = shared_prefix
        self.pins = pins
        self.handle: int | None = None
        self.computed = 0
        self.reusable: int | None = None  # first tokens that may be reused, if the logits of the others are needed
        self.from_memory: int | None = None  # prompt tokens whose KV was reused from memory
        self.from_disk = 0  # ... and from disk
        self.restore_s = 0.0  # seconds that restoring took
        self.recomputed = 0  # stored tokens that are computed because that is faster
        self._prompt = len(self.tokens)
        self._counts = True  # whether reused tokens are counted: not after a preemption, which would count them twice

    @property
    def pending(self) -> int:
        """Number of tokens whose KV is not stored yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Number of tokens after the prompt; 0 if `replace` left fewer than the prompt had."""
        return max(len(self.tokens) - self._prompt, 0)

    @property
    def reusable_tokens(self) -> list[int]:
        """The tokens of which stored KV may be reused: not the last one, because its logits are needed."""
        return self.tokens[:-1][: self.reusable]

    def attach(self, handle: int, computed: int) -> None:
        """Attach a runner's sequence that already stores the first `computed` tokens."""
        self.handle, self.computed = handle, computed
        self._counts = self.from_memory is None
        if self._counts:
            self.from_memory = min(computed, self._prompt)

    def start_over(self, handle: int) -> None:
        """Attach an empty sequence of the runner in place of one whose contents are lost."""
        self.from_memory, self.from_disk = None, 0
        self.attach(handle, 0)

    def restored(self, length: int, from_disk: bool) -> None:
        """Record that the runner's sequence was filled up to `length` tokens, from the disk or copies in memory."""
        gained = min(length, self._prompt) - min(self.computed, self._prompt)
        self.computed = length
        if self._counts and from_disk:
            self.from_disk += gained
        elif self._counts:
            self.from_memory = (self.from_memory or 0) + gained

    def replace(self, tokens: list[int]) -> None:
        """Continue with other tokens, none of them computed. The runner's sequence must be detached."""
        self.tokens, self.computed, self.shared_prefix, self.pins = tokens, 0, 0, ()


def text_of_prompt(prompt: Sequence[int], rows: Mapping[int, ImageRows]) -> list[int]:
    """The text tokens of a prompt. Raises RequestError for an incomplete image, or one at the end."""
    spans = ImageSpans(prompt, rows)
    for at, token in enumerate(prompt):
        if token in rows and tuple(prompt[at : at + len(rows[token].ids)]) != rows[token].ids:
            raise RequestError("An image of the prompt is incomplete.")
    if prompt and spans.whole(len(prompt) - 1) != len(prompt) - 1:
        raise RequestError("The prompt ends with an image. Add text after it.")
    return spans.without(prompt)


def adapter_set(chosen: Sequence[tuple[int, float]], count: int) -> AdapterSet:
    """Sort a request's choice of `count` adapters. Raises RequestError for unknown or repeated ones and bad weights."""
    weights = dict(chosen)
    if len(weights) < len(chosen):
        raise RequestError("An adapter is named twice.")
    for number, scale in weights.items():
        if not 0 <= number < count:
            there_are = f"there are 0 to {count - 1}" if count else "the model was loaded without any (--lora)"
            raise RequestError(f"There is no adapter {number}: {there_are}.")
        if not math.isfinite(scale) or abs(scale) > LARGEST_LORA_WEIGHT:
            raise RequestError(
                f"The weight of adapter {number} is {scale}; it must be within ±{LARGEST_LORA_WEIGHT:g}."
            )
    return tuple((number, scale) for number, scale in sorted(weights.items()) if scale)
