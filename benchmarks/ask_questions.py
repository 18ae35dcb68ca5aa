"""Questions about small folders: whether the right file is ranked first, and whether missing answers are recognised.

    ask_questions.py [--embeddings MODEL.gguf]

The folders and their questions are in benchmarks/ask: code, notes, a manual, a company's files, German, French with
Spanish, Japanese with Chinese. With --embeddings, ranking by words, by meaning, and by both is compared. The index is
in a temporary data folder.
"""

import argparse
import math
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from localllm.settings import Settings
from localllm.text import table
from localllm.wings.documents.embeddings import MeaningSearch
from localllm.wings.documents.index import DocumentIndex
from localllm.wings.documents.search import Ranking, rank

FOLDERS = Path(__file__).with_name("ask")
_MOST = 1000


class Tally:
    """Ranks of the right files, and how many questions were said to have no answer, of each kind."""

    def __init__(self) -> None:
        self.ranks: list[float] = []
        self.absent = self.doubted = self.recognised = 0

    def ask(self, index: DocumentIndex, spec: Mapping[str, Any], ranked: Callable[[str], Ranking]) -> None:
        """Ask a folder's questions."""
        for question, right in spec["questions"]:
            ranking = ranked(question)
            order = list(ranking.scores)
            files = index.excerpts(order)
            found = [files[chunk].name for chunk in order]
            self.ranks.append(found.index(right) + 1 if right in found else math.inf)
            self.doubted += not ranking.fits
        self.absent += len(spec["absent"])
        self.recognised += sum(not ranked(question).fits for question in spec["absent"])

    def row(self, name: str) -> list[str]:
        """A row of the table."""
        size = len(self.ranks)
        first, three = (sum(rank <= most for rank in self.ranks) for most in (1, 3))
        mean = sum(1 / rank for rank in self.ranks) / size
        doubts = f"{self.recognised}/{self.absent}", f"{self.doubted}/{size}"
        return [name, f"{first}/{size}", f"{three}/{size}", f"{mean:.3f}", *doubts]


def by_meaning(meaning: MeaningSearch, question: str) -> Ranking:
    """By cosine alone."""
    nearest = meaning.nearest(question, _MOST, ())
    return Ranking(nearest.cosines if nearest else {}, fits=True)


def measured(embeddings: Path | None) -> list[list[str]]:
    """Rows for each folder and way of ranking, and for all folders together."""
    questions = tomllib.loads((FOLDERS / "questions.toml").read_text(encoding="utf-8"))
    ways = ("words", "meaning", "both") if embeddings else ("words",)
    totals = {way: Tally() for way in ways}
    rows = []
    for folder, spec in questions.items():
        with DocumentIndex(FOLDERS / folder) as index:
            index.update()
            asked: dict[str, Callable[[str], Ranking]] = {"words": partial(rank, index)}
            meaning = MeaningSearch(index, embeddings, Settings()) if embeddings else None
            if meaning is not None:
                meaning.embed_new(math.inf, lambda _done, _total: True)
                asked["meaning"] = partial(by_meaning, meaning)
                asked["both"] = partial(rank, index, meaning=meaning)
            for way, ranked in asked.items():
                tally = Tally()
                for each in (tally, totals[way]):
                    each.ask(index, spec, ranked)
                rows.append(tally.row(f"{folder}, {way}"))
            if meaning is not None:
                meaning.close()
    return [*rows, *(total.row(f"all, {way}") for way, total in totals.items())]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embeddings", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        os.environ["XDG_DATA_HOME"] = data
        heads = ["folder, ranked by", "right file first", "in the first 3", "mean 1/rank", "no answer seen", "wrongly"]
        sys.stdout.write(table([heads, *measured(arguments.embeddings)]) + "\n")


if __name__ == "__main__":
    main()
