"""A model that another server computes, in the place of one that is loaded here."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localllm.engine.request import SamplingParams
from localllm.engine.stream import GenerationStream
from localllm.remote.errors import RemoteError
from localllm.remote.server import RemoteServer
from localllm.server.errors import ApiError
from localllm.server.front.requests import chat_fields, completion_fields, sampling_fields
from localllm.server.front.stream import Reading, Spellings

if TYPE_CHECKING:
    from localllm.server.chat import Chat, Limits


@dataclass(frozen=True, slots=True)
class Gap:
    """A prompt that asks for what stands between two texts."""

    prefix: str
    suffix: str


# What a server can be asked to continue: text, token ids of its own vocabulary, or a gap.
Prompt = str | Sequence[int] | Gap


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """A request in the fields of the protocol. given: the sampling parameters that the client has set.

    prompt stands for the token ids of a request here, which nobody knows.
    """

    chats: bool
    fields: dict[str, Any]
    sampling: SamplingParams
    given: frozenset[str]
    prompt: tuple[int, ...] = field(default=(), init=False)


@dataclass(frozen=True, slots=True)
class ForeignTemplate:
    """What is asked of a chat template, where there is one elsewhere: everything may be tried, the server refuses."""

    is_default: bool = False
    supports_tools: bool = True
    supports_thinking: bool = False  # so that nobody is told to think who has not been asked to
    reasoning_markers: tuple[tuple[str, str], ...] = ()


class ForeignModel:
    """One model of a server. Thread-safe."""

    def __init__(self, server: RemoteServer, name: str, fills_in: bool = True) -> None:
        self.name = name
        self.template = ForeignTemplate()
        self.tokenizer = Spellings()
        self._server = server
        self._fills_in = fills_in

    def tokenise(self, text: str) -> str:
        """The text itself: the server turns it into tokens."""
        return text

    def chat_request(self, chat: "Chat", limits: "Limits", forced: str | None = None) -> ForeignRequest:
        """See requests.chat_fields. Raises ApiError 400."""
        return ForeignRequest(True, chat_fields(chat, limits, forced), limits.sampling, limits.given)

    def text_request(self, prompt: Prompt, limits: "Limits", format: Any = None) -> ForeignRequest:
        """A request to continue a prompt. Raises ApiError 400, or 501 for a gap that the server would not see."""
        fields = completion_fields(limits, format)
        if isinstance(prompt, Gap):
            if not self._fills_in:
                raise ApiError(501, f"{self._server.endpoint} reads no suffix: fill in by its own route /infill")
            fields |= {"prompt": prompt.prefix, "suffix": prompt.suffix}
        else:
            fields["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        return ForeignRequest(False, fields, limits.sampling, limits.given)

    async def submit(self, requests: Sequence[ForeignRequest]) -> list[GenerationStream]:
        """Ask, and wait until all are accepted; where one is refused, or the task is cancelled, none goes on.

        Raises RemoteError.
        """
        readings = [self._read(request) for request in requests]
        try:
            await asyncio.gather(*(asyncio.wrap_future(reading.opened) for reading in readings))
        except BaseException:
            for reading in readings:
                reading.stream.cancel()
            raise
        return [reading.stream for reading in readings]

    def _read(self, request: ForeignRequest) -> Reading:
        options = {**request.fields, **sampling_fields(request.sampling, request.given)}
        if request.chats:
            answer = self._server.chat(self.name, options.pop("messages"), options)
        else:
            answer = self._server.complete(self.name, options.pop("prompt"), options)
        return Reading(answer, self.tokenizer, request.sampling.logprobs or 0)


class ForeignEmbedder:
    """A model of a server that makes vectors, or scores documents. Thread-safe."""

    def __init__(self, server: RemoteServer, name: str) -> None:
        self.name = name
        self._server = server

    def tokenise(self, text: str) -> str:
        """The text itself: the server turns it into tokens."""
        return text

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, truncate: bool, dimensions: int | None
    ) -> tuple[NDArray[np.float32], int]:
        """Rows of Euclidean length 1 and how many tokens were read; see EmbeddingModel.embed.

        Whether a long text is cut is the server's to decide: the protocol has no word for it, so truncate has no
        effect. Raises RemoteError.
        """
        options = {"encoding_format": "float"} | ({"dimensions": dimensions} if dimensions is not None else {})
        vectors, tokens = self._server.embed(self.name, texts, options)
        try:
            rows = np.array(vectors, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise RemoteError(f"{self._server.endpoint} sends vectors that are no lists of numbers.") from error
        if rows.ndim != 2 or len(rows) != len(texts):
            raise RemoteError(f"{self._server.endpoint} sends {rows.shape} numbers for {len(texts)} texts.")
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny), tokens

    def rank(self, query: str, documents: Sequence[str], *, truncate: bool) -> tuple[NDArray[np.float32], int]:
        """The score of each document and how many tokens were read; see EmbeddingModel.rank.

        truncate has no effect, as with embed. Raises RemoteError.
        """
        found, tokens = self._server.rank(self.name, query, documents)
        scores = np.full(len(documents), -np.inf, dtype=np.float32)
        for index, score in found:
            if not 0 <= index < len(documents):
                raise RemoteError(f"{self._server.endpoint} scores document {index} of {len(documents)}.")
            scores[index] = score
        if not np.isfinite(scores).all():
            raise RemoteError(f"{self._server.endpoint} leaves documents without a score.")
        return scores, tokens


def not_told(what: str) -> ApiError:
    """The refusal of what OpenAI's protocol has no route for."""
    return ApiError(501, f"{what}: the server that computes here cannot be asked for it in OpenAI's protocol")
