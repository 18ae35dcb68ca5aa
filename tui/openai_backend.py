"""The chat's backend on a server that speaks OpenAI's protocol: vLLM, SGLang, llama.cpp and many more."""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from localllm.engine.inspection import EngineSnapshot
from localllm.engine.request import SamplingParams
from localllm.errors import RequestError
from localllm.remote.errors import RemoteError
from localllm.remote.server import EXTENSIONS, STANDARD, RemoteAnswer, RemoteServer, sampling_options
from tui.backend import AnswerUpdate, ChatRequest, LoadProgress, ModelChoice, ModelInfo, Recipe, join_parts


class OpenAIAnswer:
    """Reads a server's answer on a thread of its own, so that polling never waits."""

    def __init__(self, answer: RemoteAnswer) -> None:
        self._answer = answer
        self._updates: deque[AnswerUpdate] = deque()
        threading.Thread(target=self._read, daemon=True).start()

    def poll(self) -> AnswerUpdate | None:
        """See Answer.poll."""
        waiting = [self._updates.popleft() for _ in range(len(self._updates))]
        if not waiting:
            return None
        return replace(waiting[-1], parts=join_parts(part for update in waiting for part in update.parts))

    def cancel(self) -> None:
        """See Answer.cancel."""
        self._answer.cancel()

    def _read(self) -> None:
        for update in self._answer:
            self._updates.append(
                AnswerUpdate(
                    parts=update.parts,
                    counts=update.counts,
                    timings=update.timings,
                    finish_reason=update.finish_reason,
                    error=update.error,
                )
            )


class OpenAIBackend:
    """Talks to one server. Thread-safe."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo | None:
        """See Backend.info."""
        return self._info

    def load(self, name: str, progress: LoadProgress, pull: bool = True) -> ModelInfo:
        """See Backend.load. The server has its models loaded, or loads them when they are first asked."""
        progress(f"asking {self._server.endpoint}", 0.0)
        offered = self._server.models()
        found = next((model for model in offered if model.name == name), None)
        if found is None:
            names = ", ".join(model.name for model in offered) or "none"
            raise RemoteError(f"{self._server.endpoint} has no model {name!r}. It has: {names}.")
        place = str(self._server.endpoint)
        self._info = info = ModelInfo(name=name, place=place, context=found.context, can_think=True)
        return info

    def submit(self, request: ChatRequest) -> OpenAIAnswer:
        """See Backend.submit. The server keeps to its own context, so that request.context has no place."""
        if self._info is None:
            raise RequestError("No model is chosen. Choose one with /load.")
        messages = [{"role": turn.role, "content": turn.parts} for turn in request.turns]
        return OpenAIAnswer(self._server.chat(self._info.name, messages, _options(request)))

    def count_tokens(self, text: str) -> int | None:
        """The protocol has no way to ask."""
        return None

    def picture_tokens(self, data: bytes) -> int | None:
        """The protocol has no way to ask; a server whose model reads no pictures says so when it is asked to."""
        return None

    def models(self, near: str | None) -> Sequence[ModelChoice]:
        """The server's models."""
        present = self._info.name if self._info else None
        return [
            ModelChoice(name=model.name, context=model.context, loaded=model.name == present)
            for model in self._server.models()
        ]

    def save(self, name: str, recipe: Recipe) -> None:
        """The protocol has no models of one's own."""
        raise RequestError("This server cannot keep models. The chat itself is kept: F3 lists it.")

    def inspect(self) -> "Future[EngineSnapshot] | None":
        """A server's engine cannot be looked into."""
        return None

    def memory_bytes(self) -> int | None:
        """The memory is the server's."""
        return None

    def close(self) -> None:
        """Nothing is held between requests."""


def _options(request: ChatRequest) -> dict[str, Any]:
    """The request's fields. Of those that not every server knows, the ones that differ from what is usual.

    An answer that goes on is named as one: vLLM and SGLang would begin anew, and llama.cpp repeat what is there.
    """
    usual = SamplingParams()
    changed = {name for name in EXTENSIONS if getattr(request.sampling, name) != getattr(usual, name)}
    options = sampling_options(request.sampling, {*STANDARD, *changed})
    if request.max_tokens is not None:
        options["max_tokens"] = request.max_tokens
    if request.thinking is not None:
        options["chat_template_kwargs"] = {"enable_thinking": request.thinking}
    if request.continues:
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    return options
