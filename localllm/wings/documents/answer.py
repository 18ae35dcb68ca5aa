"""Questions and answers about documents, independent of the front end."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from localllm.answer.request import Message
from localllm.quoting.excerpt import INSTRUCTION, Excerpt, as_file
from localllm.quoting.quotations import QuotationChecker
from localllm.text import counted
from localllm.wings.documents.index import IndexReport

_SHOWN_PLACES = 12


def messages_for(excerpts: Sequence[Excerpt], question: str, drawn: Mapping[Excerpt, bytes]) -> list[Message]:
    """The conversation for a model: the constant part comes first, so that its keys and values are computed once.

    drawn: the pictures of pages without text.
    """
    parts: list[dict[str, Any]] = []
    for each in excerpts:
        text = f"{each.label}, a picture:" if each.is_picture else as_file(each.label, each.text)
        parts.append({"type": "text", "text": text})
        if each.is_picture:
            parts.append({"type": "image", "data": drawn[each]})
    parts.append({"type": "text", "text": question})
    texts = "\n".join(part["text"] for part in parts if part["type"] == "text")
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": parts if drawn else texts}]


def verdict(checker: QuotationChecker, excerpts: Sequence[Excerpt]) -> str:
    """The result of checking an answer, in words."""
    pictures = [each.label for each in excerpts if each.is_picture]
    return " ".join(
        [_checked(checker, excerpts), *([f"Pictures are not checked: {_listed(pictures)}."] * bool(pictures))]
    )


def _checked(checker: QuotationChecker, excerpts: Sequence[Excerpt]) -> str:
    quotations = checker.quotations
    if not quotations:
        given = _listed([excerpt.label for excerpt in excerpts])
        return f"The answer quotes nothing, so nothing in it was checked. It was given {given}."
    found = sum(each.place is not None for each in quotations)
    what = counted(len(quotations), "quotation")
    if found == len(quotations):
        return f"{what}, found word for word: {_listed(checker.places)}."
    rest = f": {_listed(checker.places)}" if found else ""
    return f"{what}, of which {len(quotations) - found} not found word for word and {found} found{rest}."


def problems_in_words(report: IndexReport) -> str:
    """Why files are missing from the index, or incomplete: each reason once, with an example file; "" if none are."""
    if not report.problems and not report.too_many:
        return ""
    counts = Counter(report.problems.values())
    examples = {problem: name for name, problem in reversed(report.problems.items())}
    reasons = [
        f"{examples[problem]}{f' and {count - 1} more' if count > 1 else ''}: {problem}"
        for problem, count in counts.most_common(5)
    ]
    if len(counts) > len(reasons):
        reasons.append(f"{sum(counts.values()) - sum(count for _, count in counts.most_common(5))} files for others")
    if report.too_many:
        reasons.insert(0, f"the folder has more files than are indexed: name a smaller one ({report.files} were taken)")
    return "Not indexed, or not whole: " + "; ".join(reasons) + "."


def as_json(checker: QuotationChecker, excerpts: Sequence[Excerpt], report: IndexReport) -> Mapping[str, Any]:
    """Excerpts, quotations and the index for programs."""
    return {
        "quotations": [asdict(each) for each in checker.quotations],
        "excerpts": [
            {"file": each.name, "page": each.page or None, "first_line": each.line, "last_line": each.last_line}
            for each in excerpts
        ],
        "index": {key: value for key, value in asdict(report).items() if key != "too_many"},
    }


def _listed(places: Sequence[str]) -> str:
    more = len(places) - _SHOWN_PLACES
    return ", ".join(places[:_SHOWN_PLACES]) + (f" and {more} more" if more > 0 else "")


def file_count(excerpts: Sequence[Excerpt]) -> str:
    """The number of excerpts and of their files, in words."""
    files = len({PurePath(each.name) for each in excerpts})
    return f"{counted(len(excerpts), 'excerpt')} of {counted(files, 'file')}"
