"""What `localllm ask` does: indexes a folder, finds excerpts, and shows an answer as its quotations are checked."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import typer

from gguf_io import open_model
from localllm.answer.event import AnswerEvent
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.errors import RequestError
from localllm.front.answering import RunningAnswer, begin_answer
from localllm.front.models import FoundModel, usual_model
from localllm.front.printing import end_fields, end_if_failed, interrupt_cancels, note_pictures, show_progress
from localllm.front.pulling import obtain
from localllm.front.terminal import ExitCode, StatusLine, answer, note
from localllm.placement.companions import projector_of
from localllm.quoting.excerpt import Excerpt
from localllm.quoting.quotations import QuotationChecker, QuotedSource
from localllm.settings import Settings, load_settings
from localllm.wings.documents.answer import as_json as documents_as_json
from localllm.wings.documents.answer import file_count, messages_for, problems_in_words, verdict
from localllm.wings.documents.embeddings import OFFERED, MeaningSearch, find_embedding_model
from localllm.wings.documents.index import DocumentIndex, IndexReport
from localllm.wings.documents.search import DOUBT, PICTURE_TOKENS, Found, find_excerpts

EMBED_S = 30.0  # embedding time before an answer; --index has no limit
LEAST_ROOM = 256  # minimum token budget for excerpts
ASSUMED_CONTEXT = 8192


def ask_folder(
    folder: Path,
    prompt: str | None,
    model: str | None,
    flags: Mapping[str, object],
    *,
    index_only: bool,
    embeddings: str | None,
    excerpts: int,
    as_json: bool,
) -> None:
    """Index the folder and answer. The arguments are those of the command; flags: settings by flag.

    Raises RequestError if nothing matches, typer.Exit with the command's status, and what loading the models raises.
    """
    settings = load_settings(flags)
    question = "" if index_only else prompt or ""
    name = "" if index_only else model or usual_model(settings.remote)
    with DocumentIndex(folder) as index, StatusLine() as status:
        report = _updated(index, status, reports_problems=index_only or not as_json)
        room, pictures = _room(name, settings, flags) if question else (0, None)
        matched = _found(index, question, settings, embeddings, (excerpts, room, pictures), status)
        if index_only:
            answer(json.dumps(asdict(report), ensure_ascii=False) + "\n" if as_json else f"{_counts(report)}\n")
            return
        drawn, problems = index.drawn(matched.excerpts)
        found = [each for each in matched.excerpts if each in drawn or not each.is_picture]
        unseen = (
            f"{name} reads text only: pages without text are left out." if not pictures and index.textless(1) else ""
        )
        if not found:
            why = unseen or " ".join(problems) or "Use words that occur in the documents."
            raise RequestError(f"Nothing in {folder} matches the question. {why}")
        for told in filter(None, [unseen, *problems, "" if matched.fits or drawn else DOUBT]):
            status.clear()
            note(told)
        request = AnswerRequest(messages=messages_for(found, question, drawn))
        with begin_answer(name, request, settings, flags, status.share) as started:
            checker, last, raw, shown = _read(started, found, status, silent=as_json)
    end_if_failed(last, started.placement)
    _note_end(last, checker, found)
    if as_json:
        result = {
            "text": shown,
            "unchecked_text": raw,
            **documents_as_json(checker, found, report),
            "fits": matched.fits,
            **end_fields(last, name, started.load_s),
        }
        answer(json.dumps(result, ensure_ascii=False) + "\n")


def _room(name: str, settings: Settings, flags: Mapping[str, object]) -> tuple[int, int | None]:
    """The token budget for excerpts: half the context, which leaves the rest for question and answer.

    Also about how many tokens a picture takes, None if the model reads text only.
    """
    context, sees = settings.ctx or ASSUMED_CONTEXT, True
    if not settings.remote:
        chosen = FoundModel.of(obtain(name, settings), lambda own: load_settings(flags, model=own))
        with open_model(chosen.entry.path) as file:
            context = min(context, file.metadata.get_int(f"{file.architecture}.context_length", context))
            sees = projector_of(file, chosen.settings.mmproj) is not None
    return max(context // 2, LEAST_ROOM), (settings.image_max_tokens or PICTURE_TOKENS) if sees else None


def _updated(index: DocumentIndex, status: StatusLine, reports_problems: bool) -> IndexReport:
    """Update the index. reports_problems: also report files that could not be read."""
    status.show(f"looking for changes in {index.root}")
    report = index.update(lambda done, total: status.show(f"indexing: {done} of {total} files"))
    status.clear()
    if reports_problems and report.read and (problems := problems_in_words(report)):
        note(problems)
    return report


def _counts(report: IndexReport) -> str:
    return (
        f"{report.files} files, {report.chunks} chunks; {report.read} files read and {report.removed} removed "
        f"in {report.seconds:.1f} s"
    )


def _found(
    index: DocumentIndex,
    question: str,
    settings: Settings,
    embeddings: str | None,
    bounds: tuple[int, int, int | None],
    status: StatusLine,
) -> Found:
    """Embed new chunks, and find the excerpts for a question; an empty question finds none.

    bounds: the maximum number of excerpts, and of their tokens in total, and picture_tokens of find_excerpts.
    """
    count, room, pictures = bounds
    search = partial(find_excerpts, index, question, count=count, room=room, picture_tokens=pictures)
    chosen = None if embeddings == "none" else find_embedding_model(settings, embeddings)
    if chosen is None:
        if embeddings is None and not question:
            note(f"Indexed by words. `localllm pull {OFFERED}` adds search by meaning.")
        return search(None) if question else Found([], fits=True)
    status.show(f"loading {chosen.name}")
    with MeaningSearch(index, chosen.path, settings) as meaning:

        def show(done: int, total: int) -> bool:
            status.show(f"embedding with {chosen.name}: {done} of {total} chunks")
            return True

        tokens, left, seconds = meaning.embed_new(EMBED_S if question else math.inf, show)
        status.clear()
        if tokens and not question:
            note(f"Embedded {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tok/s.")
        if left:
            note(f"{left} chunks are searched by words only until `localllm ask FOLDER --index` has embedded them.")
        return search(meaning) if question else Found([], fits=True)


def _read(
    started: RunningAnswer, excerpts: Sequence[Excerpt], status: StatusLine, silent: bool
) -> tuple[QuotationChecker, AnswerEvent, str, str]:
    """Show an answer as it is checked; returns the checker, the last event, and the raw and the checked answer."""
    checker = QuotationChecker([QuotedSource(each) for each in excerpts])
    raw: list[str] = []
    shown: list[str] = []
    thought, last = 0, AnswerEvent()

    def show(text: str) -> None:
        shown.append(text)
        if text and not silent:
            status.clear()
            answer(text)

    with interrupt_cancels(started.stream):
        for last in started.stream:
            show_progress(last, status)
            thought += len(last.reasoning.split())
            if last.reasoning:
                status.show(f"thinking: {thought} words")
            raw.append(last.content)
            show(checker.push(last.content))
    show(checker.flush())
    if not silent and not "".join(shown[-2:]).endswith("\n"):
        answer("\n")
    return checker, last, "".join(raw), "".join(shown)


def _note_end(last: AnswerEvent, checker: QuotationChecker, excerpts: Sequence[Excerpt]) -> None:
    """Report the check and the speed. Raises typer.Exit if the answer was cancelled."""
    counts = last.counts
    note(
        f"{verdict(checker, excerpts)}\n{file_count(excerpts)}; first token after {last.timings.ttft_s:.2f} s, "
        f"{counts.cached} of {counts.prompt} prompt tokens cached."
    )
    note_pictures(last)
    if last.finish_reason is FinishReason.CANCELLED:
        raise typer.Exit(ExitCode.INTERRUPTED)
