"""Requests to the engine, and the events that it returns. Every front end reads the same stream of events."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from localllm.engine.pins import Pin
from localllm.errors import ContextOverflowError, RequestError
from localllm.sampling import COMMON, RANGES, CommonSampling, Range

if TYPE_CHECKING:  # the chat imports request records, and draws its first screen before NumPy is loaded
    from gguf_io.image_rows import ImageRows
    from gguf_io.runner_info import RunnerInfo
    from localllm.engine.constraint import Constraint, LazyConstraint

# First tokens that a rolling window keeps: models depend on them (Xiao et al., Efficient Streaming Language Models).
ATTENTION_SINKS = 4


@dataclass(frozen=True)
class SamplingParams(CommonSampling):
    """How the next token is chosen. Only requests set what is not common to settings and chats.

    mirostat 1 runs as 2, which superseded it. The final event reports the seed. watermark_key: a secret; "" for none.
    post_sampling_probs: log-probabilities are those that the token was drawn by, after penalties, masks and filters.
    """

    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    post_sampling_probs: bool = False
    watermark_key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, source: CommonSampling, **others: Any) -> "SamplingParams":
        """The common parameters of a source, such as the settings or a chat's, and `others`."""
        return cls(**{name: getattr(source, name) for name in COMMON} | others)


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class ContextPolicy(StrEnum):
    """What happens when prompt and answer exceed the context.

    REFUSE: a prompt that is too long raises ContextOverflowError. DROP_MESSAGES: drops the prompt's oldest messages
    whole, but keeps system messages and the newest. Under both, an answer that reaches the end of the context finishes
    with LENGTH. ROLLING: keeps the first tokens and drops the oldest after them, in the prompt and while the answer
    grows; the remaining window is computed again. Counts.dropped_messages and dropped_tokens report the losses.
    """

    REFUSE = "refuse"
    DROP_MESSAGES = "drop_messages"
    ROLLING = "rolling"


class PromptMessages(Protocol):
    """The messages at the start of a prompt."""

    @property
    def length(self) -> int:
        """Number of prompt tokens that belong to the messages; the rest is the start of the answer."""

    def without_oldest(self, tokens: int) -> tuple[tuple[int, ...], int]:
        """Return the tokens without the oldest messages, and how many messages were dropped.

        Saves at least `tokens` tokens if possible, but keeps system messages and the user's newest. The result depends
        on the messages alone. Raises TemplateError.
        """


class StopScope(Protocol):
    """Tells in which parts of one answer's text stop strings count."""

    def feed(self, text: str) -> Sequence[tuple[str, bool]]:
        """Add text. Returns what is decided now, in order: pieces of text, and whether stop strings count in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a conversation and its tokens ask of the engine alike. None is the model's own, else the engine's."""

    ignore_eos: bool = False
    # In tokens.
    context_limit: int | None = None
    # Counted from the first token; the first line break after it finishes the answer with LENGTH.
    line_limit_s: float | None = None
    # A line after the first that is indented by fewer spaces and tabs ends the answer, like a stop string.
    least_indent: int = 0
    # Lower values are served first.
    priority: int = 0
    # The request (a title, say) never evicts cached chats, and leaves nothing in the cache.
    background: bool = False
    context_policy: ContextPolicy = ContextPolicy.REFUSE
    # LoRA adapters by number, each with its weight.
    adapters: tuple[tuple[int, float], ...] | None = None
    # Requests share KV of known prefixes only within their namespace.
    namespace: str = ""
    # How many first tokens of the prompt a rolling window keeps, limited to less than half of the window; negative: all
    # of them.
    keep: int | None = None
    # The request's sender; clients take turns in the queue. Each request with "" counts as a client of its own.
    client: str = ""
    # Request the prompt's own log-probabilities, each with this number of most probable tokens. They need the logits of
    # the whole prompt, so no known prefix is reused; such a window never rolls.
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest(RequestOptions):
    """A prompt to continue, as token ids: rendered and tokenised once by the front end."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    # None runs to the end of the context; 0 fills the cache and generates nothing.
    max_tokens: int | None = None
    min_tokens: int = 0
    # Texts that end the answer where its stop_scope, made for each answer, says that they count; None: everywhere.
    stop: tuple[str, ...] = ()
    stop_scope: Callable[[], StopScope] | None = None
    # Texts that end the answer everywhere, as a chat template's end of turn does.
    ends: tuple[str, ...] = ()
    # Counted from submission; a request that reaches it finishes with LENGTH.
    time_limit_s: float | None = None
    # Only needed for ContextPolicy.DROP_MESSAGES, and only used if something must be dropped.
    messages: PromptMessages | None = None
    # Whether the KV may go to the disk tier afterwards.
    persist: bool = True
    # Made by LoadedModel.constraint and not advanced yet; the engine works on a copy. The constraint alone decides when
    # the answer may end, whatever min_tokens is.
    constraint: "Constraint | LazyConstraint | None" = None
    # The rows of the prompt's images, by the first id of each; a window with images never rolls.
    images: "Mapping[int, ImageRows]" = field(default_factory=dict)
    # How many first tokens of the prompt other conversations share (an agent's system text and tools, say); their KV is
    # evicted last, within a share of the memory and of the disk.
    shared_prefix: int = 0
    # Beginnings of the prompt that are evicted last for a time, within a share of the memory.
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability, and the most probable tokens.

    Before the sampler's filters, unless SamplingParams.post_sampling_probs asks for those after them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# These are made for each token, and nobody changes them. They are not frozen because making a frozen one takes four
# times as long.


@dataclass(slots=True, unsafe_hash=True)
class Counts:
    """Numbers of tokens. prompt: after dropping.

    cached_memory and cached_disk are the parts of prompt whose KV was reused from that tier. drafted and accepted count
    speculative tokens. dropped_messages and dropped_tokens were dropped by ContextPolicy. recomputed: tokens whose KV
    is stored in main memory or on disk, and was computed because that is faster on this machine. pinned_for: the prompt
    tokens that were computed and that the request pinned, by how many seconds, the longest first.
    """

    prompt: int = 0
    cached_memory: int = 0
    cached_disk: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    dropped_messages: int = 0
    dropped_tokens: int = 0
    recomputed: int = 0
    pinned_for: tuple[tuple[float, int], ...] = ()

    @property
    def cached(self) -> int:
        """Prompt tokens whose KV was not computed again."""
        return self.cached_memory + self.cached_disk

    @property
    def pinned(self) -> int:
        """Prompt tokens that were computed and that the request pinned."""
        return sum(tokens for _, tokens in self.pinned_for)


@dataclass(slots=True, unsafe_hash=True)
class Timings:
    """Seconds, from a monotonic clock. ttft_s runs from submission to the first token.

    restore_s: the part of prefill_s in which KV was copied from main memory or the disk.
    drafting_s: the part of decode_s in which a model or a layer drafted for this answer.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    restore_s: float = 0.0
    drafting_s: float = 0.0


_NO_COUNTS, _NO_TIMINGS = Counts(), Timings()


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a request before its first token. queue_position 0 means that it runs."""

    queue_position: int
    prefilled: int
    total: int


@dataclass(slots=True, unsafe_hash=True)
class TokenEvent:
    """One step of a generation."""

    # Complete UTF-8 that can no longer become part of a stop string; may be empty, or belong to several token_ids.
    text: str = ""
    token_ids: tuple[int, ...] = ()
    # Of tokens that some text was sent for. Tokens that end the answer, including those of a stop string, have none,
    # unless the prompt's are requested.
    logprobs: tuple[TokenLogprob, ...] = ()
    counts: Counts = _NO_COUNTS
    timings: Timings = _NO_TIMINGS
    # Set on events before the first token.
    progress: Progress | None = None
    # These are set on the last event only. cause: the exception behind an error. stop_string: the one that ended it.
    finish_reason: FinishReason | None = None
    seed: int | None = None
    error: str | None = None
    cause: Exception | None = None
    stop_string: str | None = None
    # Of the prompt's tokens after the first, all on the first event after the prompt.
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


MAX_LOGPROBS = 128
WITH_PROJECTOR = "Put the model's mmproj file into its folder, or pass --mmproj FILE."
MAX_BREAKERS, MAX_BREAKER_LENGTH = 64, 256
MAX_STOPS, MAX_STOP_CHARACTERS = 256, 65536


def check_request(request: GenerationRequest, text: Sequence[int], info: "RunnerInfo", sees_images: bool) -> None:
    """Raise RequestError for a request that a runner cannot serve. text: the prompt's tokens without images."""
    validate(request.sampling, info.vocab_size)
    if not text:
        raise RequestError("The prompt is empty. Send at least one token.")
    if request.images and not sees_images:
        raise RequestError("The model was loaded without a projector, so it reads no images.", remedy=WITH_PROJECTOR)
    if request.images and request.prompt_logprobs is not None:
        raise RequestError("The log-probabilities of a prompt with images are not known. Ask for them of text alone.")
    if min(text) < 0 or max(text) >= info.vocab_size:
        raise RequestError(f"A prompt token is outside the vocabulary (0 to {info.vocab_size - 1}).")
    for name in ("max_tokens", "min_tokens", "context_limit", "time_limit_s", "line_limit_s", "prompt_logprobs"):
        value = getattr(request, name)
        if value is not None and value < 0:
            raise RequestError(f"{name} is {value}; it cannot be negative.")
    if "" in request.stop:
        raise RequestError("A stop string is empty. Leave it out.")
    if len(request.stop) > MAX_STOPS or sum(map(len, request.stop)) > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"At most {MAX_STOPS} stop strings of {MAX_STOP_CHARACTERS} characters in all are allowed; "
            f"the request has {len(request.stop)} of {sum(map(len, request.stop))}."
        )


_RANGES = {**RANGES, "logprobs": Range(0, MAX_LOGPROBS)}


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError, naming the field, its value and its range, if a parameter is invalid."""
    for name, bounds in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not bounds.low <= value <= bounds.high:
            raise RequestError(f"{name} is {value}; it must be {bounds}.")
    breakers = params.dry_sequence_breakers
    if "" in breakers:
        raise RequestError("dry_sequence_breakers holds an empty string; each must have at least one character.")
    if len(breakers) > MAX_BREAKERS or any(len(breaker) > MAX_BREAKER_LENGTH for breaker in breakers):
        raise RequestError(
            f"dry_sequence_breakers may hold at most {MAX_BREAKERS} strings of at most {MAX_BREAKER_LENGTH} characters."
        )
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"logit_bias names token {token_id}; ids of this model run from 0 to {vocab_size - 1}.")
        if math.isnan(bias) or bias == math.inf:
            raise RequestError(
                f"logit_bias of token {token_id} is {bias}; it must be finite, or -inf to ban the token."
            )


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A prompt that leaves room for an answer, and what was dropped for it."""

    tokens: Sequence[int]
    dropped_messages: int = 0
    dropped_tokens: int = 0


def fit_prompt(request: GenerationRequest, context: int) -> FittedPrompt:
    """Apply the request's policy to its prompt. context: tokens of prompt and answer together.

    Raises ContextOverflowError if the policy cannot make it fit.
    """
    room = 1 if request.max_tokens is None else min(request.max_tokens, 1)
    if len(request.prompt) + room <= context and request.context_policy is not ContextPolicy.DROP_MESSAGES:
        return FittedPrompt(request.prompt)
    if request.context_policy is ContextPolicy.DROP_MESSAGES:
        return _drop_messages(request, context)
    if request.context_policy is ContextPolicy.ROLLING:
        tokens = roll(request.prompt, context, kept_first(request))
        return FittedPrompt(tokens, dropped_tokens=len(request.prompt) - len(tokens))
    raise ContextOverflowError(len(request.prompt), context)


def kept_first(request: GenerationRequest) -> int:
    """How many first tokens of the prompt its rolling window keeps."""
    if request.keep is None:
        return ATTENTION_SINKS
    return len(request.prompt) if request.keep < 0 else min(request.keep, len(request.prompt))


def roll(tokens: Sequence[int], context: int, first: int = ATTENTION_SINKS) -> list[int]:
    """Keep the first and the newest tokens, half a context in all, so that the window is rarely recomputed.

    first: how many first tokens, capped below half of the context. The newest get at least a quarter of the context.
    """
    first = min(first, (context - 1) // 2)
    newest = max(context // 2 - first, context // 4, 1)
    return [*tokens[:first], *tokens[-newest:]]


def _drop_messages(request: GenerationRequest, context: int) -> FittedPrompt:
    """Drop the oldest messages in steps of a quarter of the context.

    The steps keep the cut in one place for many turns: the next turn drops the same messages, so its prompt starts with
    a cached prefix. Up to a quarter of the context is reserved for the answer.
    """
    quarter = max(context // 4, 1)
    answer = quarter if request.max_tokens is None else min(request.max_tokens, quarter)
    excess = len(request.prompt) + answer - context
    tokens, dropped = request.prompt, 0
    if excess > 0 and request.messages is not None:
        kept, dropped = request.messages.without_oldest(-(-excess // quarter) * quarter)
        tokens = (*kept, *request.prompt[request.messages.length :])
    if len(tokens) + min(answer, 1) > context:
        raise ContextOverflowError(len(tokens), context)
    return FittedPrompt(tokens, dropped, len(request.prompt) - len(tokens))
