"""localllm cache semantic: lists and deletes stored answers, and measures thresholds."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from localllm.errors import RequestError
from localllm.front.terminal import answer, note
from localllm.library.lookup import find
from localllm.semantic.store import AnswerStore, store_path
from localllm.semantic.threshold import measure, read_pairs
from localllm.server.embeddings import EmbeddingModel
from localllm.server.options import parse_duration
from localllm.settings import load_settings
from localllm.text import human_bytes, shortened, table


def semantic_cache(delete: str | None, pairs: Path | None, embedder: str | None, rate: float, as_json: bool) -> None:
    """The command."""
    if pairs is not None:
        _measure(pairs, embedder, rate, as_json)
        return
    settings = load_settings({})
    if not os.path.isfile(store_path()):
        note("No answers are stored. `localllm serve --semantic-cache MODEL` stores them.")
        return
    store = AnswerStore(store_path(), settings.semantic_mib << 20, parse_duration(settings.semantic_ttl))
    try:
        if delete is not None:
            if delete != "all" and not (delete.isascii() and delete.isdigit()):
                raise RequestError(f"--delete is {delete!r}; use the number of a stored answer, or all.")
            gone = store.delete(None if delete == "all" else int(delete))
            if not gone and delete != "all":
                raise RequestError(f"There is no stored answer {delete}. `localllm cache semantic` lists them.")
            note(f"{gone} stored answers deleted.")
            return
        entries = store.entries()
    finally:
        store.close()
    if as_json:
        answer(json.dumps([asdict(entry) for entry in entries], ensure_ascii=False) + "\n")
        return
    rows = [
        (str(one.id), one.model, str(one.hits), human_bytes(one.bytes), shortened(" ".join(one.question.split()), 60))
        for one in entries
    ]
    answer(table([("ID", "MODEL", "HITS", "SIZE", "QUESTION"), *rows]))


def _measure(pairs: Path, embedder: str | None, rate: float, as_json: bool) -> None:
    settings = load_settings({})
    name = embedder or settings.semantic_cache
    if name is None:
        raise RequestError("Name the embedding model: --model NAME.")
    read = read_pairs(pairs)
    model = EmbeddingModel(find(name, settings).path, settings)
    try:
        found = measure(read, lambda texts: model.embed(texts, truncate=True, dimensions=None)[0], rate)
    finally:
        model.close()
    if as_json:
        answer(json.dumps(asdict(found)) + "\n")
        return
    if found.threshold > 1:
        answer(f"No threshold keeps false hits at {rate:.2%} with {name}.\n")
    else:
        answer(f"semantic_threshold = {found.threshold:.4f} keeps false hits at {rate:.2%} or less with {name}.\n")
    answer(
        f"Hits: {found.hits} of {found.same} pairs with the same meaning, {found.false_hits} of {found.different} "
        "others. "
        f"{found.refused} others differ in a number, negation, name or direction, and never hit.\n"
    )
