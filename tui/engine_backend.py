"""The chat's backend in this process: one loaded model and its engine. Imports them when the first one is loaded."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from localllm.cli.terminal import human_count
from localllm.engine.answer_parts import AnswerSplitter
from localllm.engine.inspection import EngineSnapshot
from localllm.engine.request import ContextPolicy, GenerationRequest, TokenEvent
from localllm.errors import LocalLLMError, RequestError
from localllm.library import resolve
from localllm.settings import Settings
from tui.backend import AnswerUpdate, ChatRequest, LoadProgress, ModelChoice, ModelInfo, TokenChoice, Turn, join_parts

if TYPE_CHECKING:
    from localllm.engine.loaded_model import LoadedModel
    from localllm.engine.stream import GenerationStream


class EngineAnswer:
    """A GenerationStream, its text split into content, reasoning and tool calls."""

    def __init__(self, stream: "GenerationStream", splitter: AnswerSplitter, model: "LoadedModel") -> None:
        self._stream = stream
        self._splitter = splitter
        self._model = model

    def poll(self) -> AnswerUpdate | None:
        """See Answer.poll."""
        events = self._stream.poll()
        if not events:
            return None
        last = events[-1]
        parts = self._splitter.push("".join(event.text for event in events))
        if last.finish_reason:
            parts += self._splitter.flush()
        return AnswerUpdate(
            parts=join_parts(parts),
            counts=last.counts,
            timings=last.timings,
            progress=last.progress,
            choices=tuple(choice for event in events for choice in self._choices(event)),
            finish_reason=last.finish_reason,
            error=last.error,
            seed=last.seed,
        )

    def cancel(self) -> None:
        """See Answer.cancel."""
        self._stream.cancel()

    def _choices(self, event: TokenEvent) -> list[TokenChoice]:
        def text(token_id: int) -> str:
            return self._model.tokenizer.token_bytes(token_id).decode(errors="replace")

        return [
            TokenChoice(
                text(entry.token_id),
                math.exp(entry.logprob),
                tuple((text(token_id), math.exp(logprob)) for token_id, logprob in entry.top),
            )
            for entry in event.logprobs
        ]


class EngineBackend:
    """Loads one model at a time. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._model: LoadedModel | None = None
        self._path: Path | None = None

    def load(self, name: str, progress: LoadProgress) -> ModelInfo:
        """See Backend.load. The present model is freed first, so that two never share the memory."""
        from gguf_io import open_model
        from localllm.engine.loaded_model import load_model

        with self._lock:
            path = resolve(name)
            with open_model(path):
                pass  # a file that cannot be read must not cost the model that works
            self._close()
            progress("loading", 0.0)
            self._model = model = load_model(path, self._settings, progress)
            self._path = path
        converses = not model.template.is_default
        return ModelInfo(
            name=model.file.name or path.stem,
            place=model.backend.name,
            context=model.engine.context,
            converses=converses,
            can_think=converses and model.template.supports_thinking,
            notice=None if converses else "This model has no chat template: it continues your text.",
        )

    def submit(self, request: ChatRequest) -> EngineAnswer:
        """See Backend.submit. The oldest messages are left out where the conversation outgrows the context."""
        model = self._loaded()
        if model.template.is_default:
            prompt = model.tokenise("".join(turn.content for turn in request.turns))
            splitter = AnswerSplitter((), ())
            # Such a model seldom ends by itself, and the window would roll for ever.
            most = request.max_tokens or model.engine.context // 2
            generation = replace(_limits(request), prompt=prompt, context_policy=ContextPolicy.ROLLING, max_tokens=most)
            return EngineAnswer(model.engine.submit(generation), splitter, model)
        asked = request.turns[:-1] if request.continues else request.turns
        chat = model.chat_prompt([_message(turn) for turn in asked], enable_thinking=request.thinking)
        prompt, in_reasoning = chat.tokens, chat.starts_in_reasoning
        markers = model.template.reasoning_markers
        if request.continues:
            written, in_reasoning = _written(request.turns[-1], markers, in_reasoning)
            prompt += tuple(model.tokenizer.encode(written, add_special=False, parse_special=True))
        generation = replace(
            _limits(request),
            prompt=prompt,
            stop=chat.stop,
            context_policy=ContextPolicy.DROP_MESSAGES,
            messages=chat.messages,
        )
        splitter = AnswerSplitter(markers, model.template.tool_call_markers, in_reasoning)
        return EngineAnswer(model.engine.submit(generation), splitter, model)

    def count_tokens(self, text: str) -> int | None:
        """See Backend.count_tokens."""
        model = self._model
        return len(model.tokenizer.encode(text, add_special=False)) if model else None

    def models(self, near: str | None) -> Sequence[ModelChoice]:
        """The models of this machine, and the GGUF files beside the present one; unreadable ones are left out."""
        from localllm.library.lookup import all_models

        known = [(model.name, model.path) for model in all_models(self._settings)]
        present = self._path or (resolve(near) if near else None)
        paths = {path for _, path in known}
        if present is not None:
            known += [(str(path), path) for path in sorted(present.parent.glob("*.gguf")) if path not in paths]
        return [choice for name, path in known if (choice := self._choice(name, path))]

    def inspect(self) -> "Future[EngineSnapshot] | None":
        """See Backend.inspect."""
        return self._model.engine.inspect() if self._model else None

    def memory_bytes(self) -> int | None:
        """Resident memory of this process."""
        return int(psutil.Process().memory_info().rss)

    def close(self) -> None:
        """See Backend.close."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._model:
            self._model.close()
            self._model = None

    def _loaded(self) -> "LoadedModel":
        if self._model is None:
            raise RequestError("No model is loaded. Choose one with /load.")
        return self._model

    def _choice(self, name: str, path: Path) -> ModelChoice | None:
        from gguf_io import open_model
        from localllm.library.summary import summarize

        try:
            with open_model(path) as file:
                summary = summarize(file)
        except LocalLLMError:
            return None
        return ModelChoice(
            name=name,
            size=summary.file_bytes,
            quantization=summary.quantization,
            parameters=human_count(summary.parameters),
            context=summary.context,
            memory=summary.memory_bytes(summary.context or 0),
            loaded=self._model is not None and path == self._path,
        )


def _limits(request: ChatRequest) -> GenerationRequest:
    """Everything of the engine's request but the prompt."""
    return GenerationRequest(
        prompt=(),
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        context_limit=request.context,
        background=request.background,
        persist=not request.background,
    )


def _message(turn: Turn) -> dict[str, str]:
    message = {"role": turn.role, "content": turn.content}
    return message | {"reasoning_content": turn.reasoning} if turn.reasoning else message


def _written(turn: Turn, markers: Sequence[tuple[str, str]], in_reasoning: bool) -> tuple[str, bool]:
    """What the model has written of a cut answer, and whether it stopped inside its reasoning."""
    if not turn.reasoning or not markers:
        return turn.content, in_reasoning and not turn.content
    opening, closing = markers[0]
    text = ("" if in_reasoning else opening) + turn.reasoning
    return (text + closing + turn.content, False) if turn.content else (text, True)
