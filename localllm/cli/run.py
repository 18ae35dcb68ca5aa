"""localllm run: one prompt, one answer; or the chat, if there is no prompt and a terminal."""

import contextlib
import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguf_io.system import is_terminal
from localllm.errors import RequestError
from localllm.front.options import COMPUTING, AsJson, Model, Remote, setting_flags, with_flags
from localllm.front.prompt import check_text, files_among, read_format, read_prompt, user_content
from localllm.front.terminal import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator


_THINK = {"on": True, "off": False}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
KEPT_PROMPT_TOKENS = 256  # shorter prompts are recomputed faster than they are read from the disk cache


@contextlib.contextmanager
def _without_collector() -> "Iterator[None]":
    """Start with garbage collection off: startup creates little garbage, and collecting takes a seventh of its time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@with_flags(COMPUTING, after="stop")
@_without_collector()
def run(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    given: typer.Context,
    model: Model,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            help="The prompt, and pictures, WAV, PDF or DOCX by their paths; --file and standard input are appended. "
            "Without any, the chat opens."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Stop after N tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="X", help="0 is greedy (0.8).")] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="N", help="Sample from the N likeliest tokens; 0 is off (40).")
    ] = None,
    top_p: Annotated[float | None, typer.Option(metavar="X", help="Nucleus sampling; 1 is off (0.95).")] = None,
    min_p: Annotated[
        float | None, typer.Option(metavar="X", help="Minimum share of the likeliest token; 0 is off (0.05).")
    ] = None,
    repeat_penalty: Annotated[float | None, typer.Option(metavar="X", help="Above 1 penalizes repetition (1).")] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="Above 0 penalizes tokens that occurred (0).")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="The same, for each occurrence (0).")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed for a reproducible answer.")] = None,
    watermark_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Mark the answer, so that `localllm detect` finds it.")
    ] = None,
    watermark_delta: Annotated[
        float | None, typer.Option(metavar="X", help="Added to the logits of marked tokens (2).")
    ] = None,
    watermark_gamma: Annotated[float | None, typer.Option(metavar="X", help="Share of marked tokens (0.25).")] = None,
    think: Annotated[
        str | None, typer.Option(metavar="HOW", help="Reason first: on, off, or an effort such as low or high.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="Answer in JSON: json, a JSON Schema, or a file with one."),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before TEXT; may be repeated.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Give the model a picture or another file before the prompt; may be repeated."
        ),
    ] = None,
    remote: Remote = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Draft model, or EAGLE-3 head, for speculative decoding.")
    ] = None,
    tools: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Let the model call a tool in this folder without approval, e.g. read_file, 'edit_file src/*', "
            "'run_command git status *'; may be repeated.",
        ),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do not use the disk cache.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False,
    as_json: AsJson = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and memory on stderr afterwards.")] = False,
) -> None:
    """Answer one prompt, or chat if there is none.

    Exit status: 0 for a complete answer, 2 if the model or the request is refused, 130 after Ctrl-C, which keeps the
    text written so far. Defaults are in brackets.
    """
    from localllm.answer.request import AnswerRequest
    from localllm.engine.request import FinishReason
    from localllm.front import printing, terminal
    from localllm.front.answering import begin_answer
    from localllm.settings import load_settings

    flags = {**setting_flags(given), "disk_cache": False if no_cache else None}
    of_one_answer = (prompt, file, raw, form, stop, image, tools, think, ignore_eos, as_json, stats)
    if given.obj and not any(of_one_answer) and is_terminal(sys.stdin) and is_terminal(sys.stdout):
        raise typer.Exit(given.obj(model, flags, system=system))
    settings = load_settings(flags)
    named, argument = files_among(prompt or ())
    text = read_prompt(argument, file)
    for argument in (system or "", *(stop or ())):
        check_text(argument)
    files = [*named, *(image or ())]
    for name, value in (("system", system), ("image", files or None), ("tools", tools), ("think", think)):
        if raw and value is not None:
            raise RequestError(f"--{name} cannot be used with --raw.")
    request = AnswerRequest(
        messages=[] if raw else _messages(user_content(text, files), system),
        prompt=text if raw else None,
        continues_text=not tools,
        think=_thought(think),
        format=read_format(form) if form else None,
        stop=tuple(stop) if stop else None,
        ignore_eos=ignore_eos,
        persist_from=KEPT_PROMPT_TOKENS + 1,
    )
    with terminal.StatusLine() as status, contextlib.ExitStack() as stack:
        allowed = None
        if tools:
            from localllm.wings.tools.run import answer_with_tools, opened_tools

            allowed = stack.enter_context(opened_tools(tools))
            request = replace(request, tools=allowed.toolbox.offered())
        started = stack.enter_context(begin_answer(model, request, settings, flags, status.share))
        gc.enable()
        if allowed:
            printed = answer_with_tools(started, allowed, status, silent=as_json)
        else:
            printed = printing.read(started.stream, status, silent=as_json)
        last = printed.answer.last
        printing.end_if_failed(last, started.placement)
        if as_json:
            printing.write_json(printed, model, started.placement, started.load_s)
        else:
            printing.note_cut(last, max_tokens)
            printing.note_pictures(last)
        if last.finish_reason is FinishReason.STOP and isinstance(request.format, dict):
            from localllm.answer.schema_check import unmet

            for problem in unmet(request, printed.answer):
                terminal.warn(problem)
        if stats:
            printing.write_stats(last, started.placement, started.load_s)
        if last.finish_reason is FinishReason.CANCELLED:
            raise typer.Exit(ExitCode.INTERRUPTED)


def _thought(think: str | None) -> bool | str | None:
    """The flag --think. Raises RequestError for what is neither a switch nor an effort."""
    if think is not None and think not in (*_THINK, *_EFFORTS):
        raise RequestError(f"--think is {think!r}; use on, off, or an effort: {', '.join(_EFFORTS)}.")
    return think if think is None else _THINK.get(think, think)


def _messages(content: object, system: str | None) -> list[dict[str, Any]]:
    user = {"role": "user", "content": content}
    return [user] if system is None else [{"role": "system", "content": system}, user]
