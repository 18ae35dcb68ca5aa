"""Request bodies that several protocols share: base types, OpenAI's messages and tools, limits, sampling parameters."""

import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import Field as DataclassField
from dataclasses import fields as dataclass_fields
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from localllm.answer.request import PinnedStart
from localllm.engine.request import ContextPolicy, SamplingParams
from localllm.sampling import ALIASES, CommonSampling
from localllm.server.errors import ApiError
from localllm.server.limits import (
    MAX_ADAPTERS,
    MAX_CHOICES,
    MAX_INT,
    MAX_LOGIT_BIAS,
    MAX_MARK_KEY_CHARS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_NAMED,
    MAX_NOTES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOOLS,
)
from localllm.server.options import parse_duration
from localllm.settings import IMAGE_TOKENS

log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.:$-]{1,64}")


def _not_boolean(value: Any) -> Any:
    """Refuse true and false for a number: Python counts them as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number, not true or false")
    return value


Number = Annotated[float, BeforeValidator(_not_boolean), Field(allow_inf_nan=False, ge=-1e6, le=1e6)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Limit = Annotated[int, Field(ge=-1, le=MAX_INT)]  # of tokens; -1: as many as fit
Whole = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
ImageTokens = Annotated[int, Field(ge=IMAGE_TOKENS.low, le=IMAGE_TOKENS.high)]
Object = dict[str, Any]
# fail_fast: validation stops at the first wrong item. A list may have two million.
Tokens = Annotated[list[Count], Field(fail_fast=True)]
Objects = Annotated[list[Object], Field(fail_fast=True)]
Stops = str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)]

# Defaults below the request and the model's manifest: OpenAI's; min_p, which OpenAI lacks, is Ollama's.
DEFAULTS = SamplingParams(temperature=1.0, top_p=1.0, min_p=0.0)
MAX_PRIORITY = 1000
RETENTION_S, LONG_RETENTION_S = 600.0, 86400.0  # of OpenAI's prompt caching
BANNED = -100  # a logit_bias of this or less bans the token

# Fields of other services' requests that change no answer: about their accounts, storage, places and speed.
WITHOUT_EFFECT = frozenset(
    {
        "access_programs", "anthropic_beta", "anthropic_version", "betas", "billing_policy", "client_metadata",
        "context_management", "diagnostics", "id_slot", "include", "include_obfuscation", "inference_geo", "metadata",
        "n_cache_reuse", "prediction", "prompt_cache_options", "safety_identifier", "speed", "store", "stream_options",
        "t_max_prompt_ms", "usage", "user", "user_profile_id", "workspace_id",
    }
)  # fmt: skip


def either(name: str) -> AliasChoices:
    """A sampling parameter's name and what other programs call it."""
    return AliasChoices(name, *(alias for alias, own in ALIASES.items() if own == name))


def shown(name: object) -> str:
    """A client-chosen name for the log, or a placeholder if it could be free text."""
    text = str(name)
    return repr(text) if _NAME.fullmatch(text) else "of another name"


IGNORED: ContextVar[list[str] | None] = ContextVar("ignored", default=None)
"""What is ignored of the current request, for its answer's warnings."""


def note_ignored(what: str, level: int = logging.WARNING) -> None:
    """Log that a part of a request is ignored, and name it in the answer's warnings if the level is a warning's."""
    found = IGNORED.get()
    if found is not None and level >= logging.WARNING and what not in found and len(found) < MAX_NAMED:
        found.append(what)
    log_ignored(what, level)


@lru_cache(maxsize=1000)
def log_ignored(what: str, level: int) -> None:
    """Log at most MAX_NOTES lines a minute, each once while it is among the last thousand."""
    if _NOTES.allows():
        log.log(level, "ignored: %s", what)


class _Notes:
    """Counts the lines of each minute. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._count = 0

    def allows(self) -> bool:
        """Whether one more line may be logged now. Once a minute, logs that there are too many."""
        with self._lock:
            if time.monotonic() > self._until:
                self._until, self._count = time.monotonic() + 60, 0
            self._count += 1
            if self._count == MAX_NOTES + 1:
                log.warning(
                    "ignored: more than %d parts of requests; the others of this minute are not named", MAX_NOTES
                )
            return self._count <= MAX_NOTES


_NOTES = _Notes()


def note_unknown(names: Collection[str], what: str, level: int, hint: Callable[[str], str] = lambda _: "") -> None:
    """Log the names that a request has and nobody knows: the first MAX_NAMED, and how many more there are.

    what: what they are, with {} for a name. hint: text to add to a name's line.
    """
    for name in sorted(names)[:MAX_NAMED] if len(names) <= MAX_NAMED else itertools.islice(names, MAX_NAMED):
        note_ignored(what.format(shown(name)) + hint(name), level)
    if len(names) > MAX_NAMED:
        note_ignored(f"{len(names) - MAX_NAMED:,} more, such as {what.format('of another name')}", level)


class Body(BaseModel):
    """A request's body, or a part of one. true and false are no numbers.

    Unknown fields are ignored and logged once; the answer names those of the request itself and of its parameters. A
    field that is null has its default, as in Ollama and llama.cpp's server.
    """

    parameter: ClassVar[str] = ""  # the request's parameter that is such an object

    model_config = ConfigDict(protected_namespaces=(), populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        return {name: value for name, value in given.items() if value is not None or name not in _never_null(cls)}

    @model_validator(mode="before")
    @classmethod
    def _note_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict) and cls.model_config.get("extra") != "allow":
            unknown = given.keys() - cls.model_fields.keys() - _aliases(cls)
            asked = {name for name in unknown - WITHOUT_EFFECT if given[name] is not None}
            told = asked if cls.parameter or "model" in cls.model_fields else set()  # not in each message and tool
            what = f"field {{}} of {cls.parameter or cls.__name__}"
            note_unknown(told, what, logging.WARNING)
            note_unknown(unknown - told, what, logging.INFO)
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        return _not_boolean(value) if info.field_name in _numbers(cls) else value


@cache
def _numbers(body: type[Body]) -> frozenset[str]:
    """The names of the fields that take a number, and neither true nor false."""
    taken = {name: _types(field.annotation) for name, field in body.model_fields.items()}
    return frozenset(name for name, types in taken.items() if types & {int, float} and bool not in types)


def _types(annotation: Any) -> set[Any]:
    """The types that a value may have itself, as opposed to its items."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        parts = get_args(annotation)
        return set().union(*map(_types, parts if get_origin(annotation) is not Annotated else parts[:1]))
    return {annotation}


@cache
def _never_null(body: type[Body]) -> frozenset[str]:
    """The names of the fields that have a default and no meaning for null."""
    optional = {name: field for name, field in body.model_fields.items() if not field.is_required()}
    fields = {name: field for name, field in optional.items() if not _types(field.annotation) & {NoneType, Any}}
    return frozenset(fields).union(*map(_names, fields.values()))


def _names(field: FieldInfo) -> Iterator[str]:
    """The aliases of a field."""
    for alias in (field.alias, field.validation_alias):
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        yield from (name for name in choices if isinstance(name, str))


@cache
def _aliases(body: type[Body]) -> frozenset[str]:
    """The aliases of a body's fields."""
    return frozenset(name for field in body.model_fields.values() for name in _names(field))


class AppliedAdapter(Body):
    """A LoRA adapter that the server was started with, by its index, as in llama.cpp's server."""

    id: Count
    scale: Number = 1.0


AppliedAdapters = Annotated[list[AppliedAdapter], Field(fail_fast=True, max_length=MAX_ADAPTERS)]


class NamedBody(Body):
    """A request about a model; the only one if it names none."""

    model: str = ""


class ComputedBody(NamedBody):
    """A request that a model computes. Our additions to the protocols, as far as embeddings and ranks have them too.

    keep_alive: how long the model stays loaded. truncate: shorten what does not fit instead of refusing it.
    """

    keep_alive: Number | str | None = None
    truncate: bool = False


def _sampling_field(parameter: DataclassField[Any]) -> tuple[Any, None]:
    """A body's optional field for a parameter of CommonSampling."""
    kind = Number if parameter.type is float else Whole
    aliases = Field(validation_alias=either(parameter.name)) if parameter.name in ALIASES.values() else Field()
    return Annotated[kind | None, aliases], None


if TYPE_CHECKING:
    _CommonFields = Body
else:
    _CommonFields = create_model(
        "_CommonFields", __base__=Body, **{one.name: _sampling_field(one) for one in dataclass_fields(CommonSampling)}
    )


class SamplingFields(_CommonFields):
    """The sampling parameters of OpenAI's, Anthropic's and llama.cpp's protocols: those of SamplingParams.

    The engine checks their values.
    """

    dry_sequence_breakers: Annotated[tuple[str, ...], Field(max_length=64)] | None = None
    watermark_key: Annotated[str | None, Field(max_length=MAX_MARK_KEY_CHARS, repr=False)] = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """The parameters that are set, by name."""
        return {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}


class Extensions(SamplingFields, ComputedBody):
    """Our additions to OpenAI's and Anthropic's protocols.

    num_ctx limits the context, image_min_tokens and image_max_tokens each picture's tokens, truncate drops old messages
    that do not fit, progress asks for events before the first token. lora replaces the default adapters; an empty list
    uses none. service_tier "flex", OpenAI's, lets other requests go first; so does a higher priority, vLLM's.
    prompt_cache_key and prompt_cache_retention, OpenAI's, pin the prompt.
    """

    num_ctx: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    image_min_tokens: ImageTokens | None = None
    image_max_tokens: ImageTokens | None = None
    progress: bool = False
    lora: AppliedAdapters | None = None
    service_tier: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    prompt_cache_key: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def request_fields(self, stop: Any, logprobs: int | None = None) -> dict[str, Any]:
        """The fields of an AnswerRequest for limits and sampling. Raises ApiError 400."""
        sampling = self.sampling_fields()
        if biases := getattr(self, "logit_bias", None):
            sampling["logit_bias"] = _biases(biases)
        if logprobs is not None:
            sampling["logprobs"] = logprobs
        return {
            "sampling": sampling,
            "defaults": DEFAULTS,
            "stop": None if stop is None else stop_strings(stop),
            "context_limit": self.num_ctx,
            "image_min_tokens": self.image_min_tokens,
            "image_max_tokens": self.image_max_tokens,
            "context_policy": ContextPolicy.DROP_MESSAGES if self.truncate else ContextPolicy.REFUSE,
            "background": self.service_tier == "flex",
            "priority": self.priority,
            "pins": self._pins(),
            "adapters": None if self.lora is None else tuple((entry.id, entry.scale) for entry in self.lora),
        }

    def _pins(self) -> tuple[PinnedStart, ...]:
        if self.prompt_cache_retention == "24h":
            return (PinnedStart(LONG_RETENTION_S),)
        return (PinnedStart(RETENTION_S),) if self.prompt_cache_key or self.prompt_cache_retention else ()


class StreamOptions(Body):
    """include_usage: whether a last chunk reports token counts."""

    parameter = "stream_options"
    include_usage: bool = False


class Timed(Extensions):
    """llama-server's form of progress, and timings in every event of a stream."""

    return_progress: bool = False
    timings_per_token: bool = False

    @model_validator(mode="after")
    def _progress_either_way(self) -> Self:
        self.progress |= self.return_progress
        return self


class Sampled(Timed):
    """Fields of OpenAI's chat completions and completions, and of llama.cpp's routes."""

    stop: Stops | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    max_tokens: Limit | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class FunctionCall(Body):
    """The function of a tool call. arguments: JSON text; an object is accepted too."""

    name: str
    arguments: str | Object = "{}"


class CustomCall(Body):
    """The call of a custom tool. input: any text."""

    name: str
    input: str = ""


class OpenAIToolCall(Body):
    """A tool call in an assistant's message: of a function, or of a custom tool."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class OpenAIMessage(Body):
    """A message in OpenAI's format."""

    role: str
    content: str | Objects | None = None
    name: str | None = None
    tool_calls: Annotated[list[OpenAIToolCall], Field(fail_fast=True)] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ToolFunction(Body):
    """A tool's definition; other fields go to the template unchanged."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]


class OpenAITool(Body):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: ToolFunction


Messages = Annotated[list[OpenAIMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[OpenAITool], Field(fail_fast=True, max_length=MAX_TOOLS)]


def keep_alive_s(value: float | str | None) -> float | None:
    """Seconds, or None for the server's default. Raises ApiError 400."""
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def stop_strings(value: Any, name: str = "stop") -> tuple[str, ...]:
    """Parse a string or a list of strings, dropping empty ones. Raises ApiError 400, also if too many or too long."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ApiError(400, f'option "{name}" must be of type array of strings')
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ApiError(400, f"at most {MAX_STOPS} stop strings of {MAX_STOP_CHARS} characters are allowed")
    return tuple(stop for stop in stops if stop)


def offered_tools(tools: list[OpenAITool] | None) -> list[Object]:
    """The tools as chat templates expect them."""
    return [{"type": "function", "function": tool.function.model_dump(exclude_unset=True)} for tool in tools or []]


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not token.isdecimal() or len(token) > 10:
            raise ApiError(400, f"logit_bias: {token[:32]!r} is not a token id")
        biases[int(token)] = -math.inf if bias <= BANNED else bias
    return biases
