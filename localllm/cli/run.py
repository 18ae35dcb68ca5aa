"""localllm run: one prompt, one answer."""

import contextlib
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.exit_code import ExitCode
from localllm.cli.options import (
    AsJson,
    Backend,
    CpuMoe,
    Debug,
    GpuLayers,
    KVTypeK,
    KVTypeV,
    Lora,
    MainGpu,
    Mmproj,
    Model,
    Remote,
    Rpc,
    SplitMode,
    computing_flags,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from localllm.cli import generation
    from localllm.cli.prompt import Asked
    from localllm.cli.terminal import StatusLine
    from localllm.engine.images import ImageRows
    from localllm.engine.loaded_model import LoadedModel
    from localllm.engine.request import GenerationRequest
    from localllm.library.behaviour import Behaviour
    from localllm.settings import Settings


# One-shot prompts below this are computed again sooner than they are read back.
KEPT_PROMPT_TOKENS = 256


def run(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    given: typer.Context,
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; --file and standard input are appended.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message for the chat template.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Stop after N tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="X", help="0 takes the likeliest token (0.8).")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", help="Sample from the N likeliest; 0 is off (40).")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="X", help="Nucleus sampling; 1 is off (0.95).")] = None,
    min_p: Annotated[float | None, typer.Option(metavar="X", help="Least share of the best; 0 is off (0.05).")] = None,
    repeat_penalty: Annotated[float | None, typer.Option(metavar="X", help="Above 1 avoids repetition (1).")] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="Above 0 avoids what has occurred (0).")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="The same, for each time it did (0).")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Makes the answer reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before TEXT; may be repeated.")] = None,
    ctx: Annotated[int | None, typer.Option(metavar="N", help="Context limit in tokens (the model's).")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Threads to compute with (one a core).")] = None,
    backend: Backend = None,
    gpu_layers: GpuLayers = None,
    main_gpu: MainGpu = None,
    split_mode: SplitMode = None,
    n_cpu_moe: CpuMoe = None,
    lora: Lora = None,
    mmproj: Mmproj = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Show the model a PNG or JPEG before the prompt; may be repeated."),
    ] = None,
    rpc: Rpc = None,
    kv_type_k: KVTypeK = None,
    kv_type_v: KVTypeV = None,
    remote: Remote = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="A small model that guesses ahead.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither read nor write the cache on disk.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on where the model would end.")] = False,
    as_json: AsJson = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and memory on stderr afterwards.")] = False,
    debug: Debug = False,
) -> None:
    """Answer one prompt.

    Exits with 0 when the answer is complete, 2 when the model or the request cannot be served, 130 after Ctrl-C, which
    keeps what was written so far. Values in brackets are the defaults.
    """
    from localllm.cli import generation, terminal
    from localllm.cli.prompt import Asked, check_images, check_text, read_image, read_prompt
    from localllm.engine.request import FinishReason, SamplingParams
    from localllm.engine.sampling.validation import check_ranges
    from localllm.engine.stream import fold
    from localllm.settings import load_settings

    flags: dict[str, object] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        **computing_flags(given),
        "remote": remote,
        "draft": draft,
        "disk_cache": False if no_cache else None,
    }
    settings = load_settings(flags)
    check_ranges(SamplingParams.of(settings))
    text = read_prompt(prompt, file)
    for argument in (system or "", *(stop or ())):
        check_text(argument)

    asked = Asked(text, system, raw, tuple(stop or ()), ignore_eos, tuple(map(read_image, image or ())))
    check_images(asked)
    with (
        terminal.StatusLine() as status,
        _remotely(model, asked, settings, flags) if settings.remote else _here(model, asked, flags, status) as started,
    ):
        with generation.interrupt_cancels(started.stream):
            events = generation.with_progress(started.stream, status)
            completion = fold(events if as_json else generation.written(events))
        last = completion.last
        if last.finish_reason is FinishReason.ERROR:
            terminal.fail(last.error or "the engine stopped without a reason")
            elsewhere = started.backend.backend == "remote"  # whose refusal is no failure of ours
            raise typer.Exit(ExitCode.REFUSED if elsewhere else ExitCode.FAILED)
        if as_json:
            generation.write_json(completion, model, started.backend, started.load_s)
        if stats:
            generation.write_stats(last, started.backend, started.load_s)
        if last.finish_reason is FinishReason.CANCELLED:
            raise typer.Exit(ExitCode.INTERRUPTED)


@contextlib.contextmanager
def _here(
    model: str, asked: "Asked", flags: "Mapping[str, object]", status: "StatusLine"
) -> "Iterator[generation.Started]":
    """Load the model into this process and begin to answer. Its own parameters go below what the user says."""
    from localllm.cli import generation
    from localllm.cli.pull import obtain
    from localllm.engine.loaded_model import load_model
    from localllm.engine.projectors import WITHOUT
    from localllm.engine.request import SamplingParams
    from localllm.engine.sampling.validation import check_ranges
    from localllm.library.behaviour import behaviour_of
    from localllm.settings import load_settings

    found = obtain(model, load_settings(flags))
    behaviour = behaviour_of(found)
    settings = load_settings(flags, model=behaviour.settings)
    if not asked.images and flags["mmproj"] is None:  # text alone needs neither the projector nor, for it, llama.cpp
        settings = replace(settings, mmproj=WITHOUT)
    check_ranges(SamplingParams.of(settings))
    began = monotonic()
    with load_model(found.path, settings, status.share, behaviour.template) as loaded:
        load_s = monotonic() - began
        stream = loaded.engine.submit(_request(loaded, settings, behaviour, asked))
        yield generation.Started(stream, loaded.backend, load_s)


@contextlib.contextmanager
def _remotely(
    model: str, asked: "Asked", settings: "Settings", flags: "Mapping[str, object]"
) -> "Iterator[generation.Started]":
    """Have the server of the settings answer."""
    from localllm.cli.remote_run import submit

    yield submit(model, asked, settings, flags)


def _request(
    loaded: "LoadedModel", settings: "Settings", behaviour: "Behaviour", asked: "Asked"
) -> "GenerationRequest":
    """The request for a prompt: a conversation where the model has a chat template, else the text as it is.

    Raises RequestError for a system message that has no place, and TemplateError.
    """
    from localllm.engine.request import GenerationRequest, SamplingParams
    from localllm.errors import RequestError

    converses = not asked.raw and (bool(asked.images) or not loaded.template.is_default)
    images: Mapping[int, ImageRows] = {}
    if asked.system is not None and not converses:
        reason = "--raw leaves the chat template out" if asked.raw else "this model has no chat template"
        raise RequestError(f"--system has no place: {reason}. Put its text into the prompt.")
    stop = asked.stop
    if converses:
        system = behaviour.system if asked.system is None else asked.system
        messages = [{"role": "system", "content": system}] if system is not None else []
        chat = loaded.chat_prompt([*messages, *behaviour.messages, {"role": "user", "content": asked.content}])
        tokens, stop, images = chat.tokens, (*stop, *chat.stop, *behaviour.stop), chat.images
    else:
        tokens = loaded.tokenise(asked.text)
    return GenerationRequest(
        prompt=tokens,
        sampling=SamplingParams.of(settings),
        max_tokens=settings.max_tokens,
        stop=stop,
        ignore_eos=asked.ignore_eos,
        images=images,
        persist=len(tokens) > KEPT_PROMPT_TOKENS,
    )
