"""Starts one answer, of a model loaded into this process or of a remote server."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic

from localllm.answer.event import AnsweringModel, AnswerStream
from localllm.answer.placeholders import has_images
from localllm.answer.request import AnswerRequest, changed
from localllm.engine.request import SamplingParams
from localllm.front.options import refuse_beside_remote
from localllm.front.pulling import obtain
from localllm.placement.placement import Placement
from localllm.settings import Settings, load_settings, setting_sources


@dataclass(frozen=True, slots=True)
class RunningAnswer:
    """A running answer, its backend, the load time in seconds, and its request and model."""

    stream: AnswerStream
    placement: Placement
    load_s: float
    request: AnswerRequest
    model: AnsweringModel


def begin_answer(
    model: str,
    request: AnswerRequest,
    settings: Settings,
    flags: Mapping[str, object],
    progress: Callable[[str, float], None],
) -> contextlib.AbstractContextManager[RunningAnswer]:
    """Start a model's answer in this process, or on the remote server. settings: loaded with `flags`."""
    if settings.remote:
        return _started_remotely(model, request, settings, flags)
    return _started_here(model, request, settings, flags, progress)


@contextlib.contextmanager
def _started_here(
    model: str,
    request: AnswerRequest,
    settings: Settings,
    flags: Mapping[str, object],
    progress: Callable[[str, float], None],
) -> Iterator[RunningAnswer]:
    """Load the model into this process and start the answer. The user's settings override the manifest's parameters."""
    from localllm.front.models import FoundModel
    from localllm.packed import finish_keeping
    from localllm.placement.companions import WITHOUT

    found = FoundModel.of(obtain(model, settings), lambda own: load_settings(flags, model=own))
    settings = found.settings
    if not has_images(request.messages) and flags.get("mmproj") is None:  # lets the native engine run it
        settings = replace(settings, mmproj=WITHOUT)
    sampling = changed(SamplingParams.of(settings))
    request = replace(request, sampling=sampling, max_tokens=settings.max_tokens, context_limit=settings.ctx)
    began = monotonic()
    answering = replace(found, settings=settings).load(model, progress)
    with answering.loaded as loaded:
        load_s = monotonic() - began
        prompt = answering.prepare(request)
        yield RunningAnswer(prompt.submit(), loaded.placement, load_s, request, answering)
        sys.stdout.flush()
        finish_keeping()


@contextlib.contextmanager
def _started_remotely(
    model: str, request: AnswerRequest, settings: Settings, flags: Mapping[str, object]
) -> Iterator[RunningAnswer]:
    """Start the answer on the remote server. Sends only parameters set by flag, variable or file.

    Raises RequestError for flags that do not apply to a remote server.
    """
    from localllm.remote.openai import OpenAIServer

    refuse_beside_remote(flags)
    given = {name for name, (_, source) in setting_sources().items() if source != "default"}
    given |= {name for name, value in flags.items() if value is not None}
    names = given & SamplingParams.__dataclass_fields__.keys()
    request = replace(
        request, sampling={name: getattr(settings, name) for name in names}, max_tokens=settings.max_tokens
    )
    assert settings.remote is not None
    server = OpenAIServer.at(settings.remote, settings)
    answering = server.model(model)
    stream = answering.prepare(request).submit()
    try:
        yield RunningAnswer(stream, Placement("remote", str(server.endpoint)), 0.0, request, answering)
    finally:
        stream.cancel()
