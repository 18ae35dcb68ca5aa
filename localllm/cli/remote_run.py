"""localllm run on a server elsewhere: the same prompt, flags and output, another machine that computes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.cli.generation import Started
from localllm.cli.options import refuse_beside_remote
from localllm.engine.answer_parts import PartKind
from localllm.engine.backends import BackendChoice
from localllm.engine.request import SamplingParams, TokenEvent
from localllm.errors import RequestError
from localllm.remote.server import RemoteAnswer, remote_server, sampling_options
from localllm.settings import Settings, setting_sources

if TYPE_CHECKING:
    from localllm.cli.prompt import Asked
    from localllm.remote.server import RemoteUpdate

# How the reasoning of an answer is set apart from its content on stdout, as most models write it themselves.
THINKING = ("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True, slots=True)
class RemoteStream:
    """A server's answer as the events of a generation, so that a command shows it as one of its own."""

    answer: RemoteAnswer

    def cancel(self) -> None:
        """Ask to stop. The last event still comes."""
        self.answer.cancel()

    def __iter__(self) -> Iterator[TokenEvent]:
        thinking = False
        for update in self.answer:
            text = ""
            for part in update.parts:
                if thinking != (part.kind is PartKind.REASONING):
                    text += THINKING[thinking]
                    thinking = not thinking
                text += part.text
            if update.finish_reason and thinking:
                text += THINKING[1]
            yield _event(update, text)


def submit(model: str, asked: "Asked", settings: Settings, flags: Mapping[str, object]) -> Started:
    """Ask the server. Raises RequestError for flags that it cannot follow; its own errors come with the events.

    Only what the user has set is sent: the server knows better than our defaults what suits its model.
    """
    refuse_beside_remote(flags)
    assert settings.remote is not None
    server = remote_server(settings.remote, settings)
    options = _options(settings, flags)
    options |= {"stop": list(asked.stop)} if asked.stop else {}
    options |= {"ignore_eos": True} if asked.ignore_eos else {}
    if asked.raw:
        if asked.system is not None:
            raise RequestError("--system has no place: --raw leaves the chat template out. Put it into the prompt.")
        answer = server.complete(model, asked.text, options)
    else:
        messages = [{"role": "system", "content": asked.system}] if asked.system is not None else []
        answer = server.chat(model, [*messages, {"role": "user", "content": asked.content}], options)
    return Started(RemoteStream(answer), BackendChoice("remote", str(server.endpoint)), 0.0)


def _options(settings: Settings, flags: Mapping[str, object]) -> dict[str, Any]:
    given = {name for name, (_, source) in setting_sources().items() if source != "default"}
    given |= {name for name, value in flags.items() if value is not None}
    limit = {"max_tokens": settings.max_tokens} if settings.max_tokens is not None else {}
    return sampling_options(SamplingParams.of(settings), given) | limit


def _event(update: "RemoteUpdate", text: str) -> TokenEvent:
    return TokenEvent(
        text=text,
        counts=update.counts,
        timings=update.timings,
        finish_reason=update.finish_reason,
        error=update.error,
    )
