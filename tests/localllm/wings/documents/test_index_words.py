"""Questions as people ask them find the right chunks by their words, and a question that nothing answers is doubted."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.wings.documents.index import DocumentIndex
from localllm.wings.documents.search import LEAST_COVERAGE, find_excerpts, rank
from localllm.wings.documents.words import begin_alike, content_words, folded

ASK = Path(__file__).parents[4] / "benchmarks" / "ask"
Write = Callable[[dict[str, str]], DocumentIndex]


@pytest.fixture
def write(folder: Path) -> Write:
    """Replaces the folder's documents, and indexes them."""

    def made(files: dict[str, str]) -> DocumentIndex:
        for path in [*folder.rglob("*.md"), *folder.rglob("*.py")]:
            path.unlink()
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        index = DocumentIndex(folder)
        index.update()
        return index

    return made


def test_stop_words_are_dropped_unless_nothing_else_remains() -> None:
    assert content_words("How do I roll back a deployment?") == ["roll", "back", "deployment"]
    assert content_words("Wie kann ich den Beitrag bezahlen?") == ["Beitrag", "bezahlen"]
    assert content_words("Où est la clé ? ¿Dónde está?") == ["clé"]
    assert content_words("What is it?") == ["What", "is", "it"]
    assert content_words("snake_case कि ไทย") == ["snake", "case", "कि", "ไ", "ท", "ย"]
    assert content_words("?! ...") == []


@pytest.mark.parametrize(
    ("word", "term", "alike"),
    [
        ("deployment", "deploy", True),
        ("deploy", "deployment", True),
        ("configuration", "configure", True),
        ("turniertag", "turnier", True),
        ("roll", "rollback", True),
        ("station", "state", False),
        ("car", "carpet", False),
        ("deploy", "deploy", False),
        ("port", "report", False),
    ],
)
def test_words_with_a_stem_in_common(word: str, term: str, alike: bool) -> None:
    assert begin_alike(folded(word), folded(term)) is alike


QUESTIONS = [
    ("How do I roll back a deployment?", "docs/deploy.md"),
    ("deployment", "docs/deploy.md"),
    ("authenticating users", "auth.md"),
    ("Schlüsselverlust im Vereinsheim", "verein.md"),
    ("Binnenschiff", "hafen.md"),
    ("Wo liegt das Schiffhebewerk?", "hafen.md"),
    ("cafes", "paris.md"),
]


@pytest.mark.parametrize(("question", "right"), QUESTIONS)
def test_stems_compounds_and_accents(question: str, right: str, write: Write) -> None:
    files = {
        "calc.py": "def add(a, b):\n    return a + b\n",
        "docs/deploy.md": "Deploy with `make deploy`. Rollback with `make rollback`.",
        "auth.md": "Authentication needs a token of the user.",
        "verein.md": "Wer den Schlüssel zum Heim verliert, meldet sich beim Vorstand.",
        "hafen.md": "Ein altes Binnenschiffhebewerk.",
        "paris.md": "Le café ouvre à huit heures.",
    }
    with write(files | {f"other{number}.md": f"A text about subject {number}." for number in range(20)}) as index:
        found = find_excerpts(index, question, count=1)
        assert [each.name for each in found.excerpts] == [right]
        assert found.fits


def test_a_small_folder_is_given_whole_best_first_until_the_room_ends(write: Write) -> None:
    with write({"a.md": "apples " * 20, "b.md": "pears " * 20, "c.md": "plums " * 20}) as index:
        found = find_excerpts(index, "Which pears?", count=3)
        assert sorted(each.name for each in found.excerpts) == ["a.md", "b.md", "c.md"]
        assert [each.name for each in find_excerpts(index, "Which pears?", count=3, room=45).excerpts] == ["b.md"]
        assert [each.name for each in find_excerpts(index, "Which pears?", count=2).excerpts] == ["b.md"]
        nothing = find_excerpts(index, "zeppelins over Potsdam", count=3)
        assert len(nothing.excerpts) == 3
        assert not nothing.fits


def test_coverage_is_the_weight_of_the_words_that_one_chunk_has(write: Write) -> None:
    files = {f"{number}.md": f"common words {number}" for number in range(10)} | {"x.md": "common rare"}
    with write(files) as index:
        assert index.best_words("rare", 5).coverage == 1
        assert index.best_words("common", 5).coverage == 1
        half = index.best_words("rare zeppelin", 5)
        assert 0.3 < half.coverage < 0.5  # an unknown word counts more than the rarest known one
        few = index.best_words("common zeppelin", 5)
        assert 0 < few.coverage < LEAST_COVERAGE
        assert not rank(index, "common zeppelin").fits
        assert list(half.scores.values()) == [1.0]


def test_the_questions_of_the_benchmark_by_words_alone(folder: Path) -> None:
    questions = tomllib.loads((ASK / "questions.toml").read_text(encoding="utf-8"))
    first = asked = recognised = absent = doubted = 0
    for name, spec in questions.items():
        with DocumentIndex(ASK / name) as index:
            index.update()
            for question, right in spec["questions"]:
                ranking = rank(index, question)
                best = index.excerpts(list(ranking.scores)[:1])
                first += [each.name for each in best.values()] == [right]
                doubted += not ranking.fits
                asked += 1
            recognised += sum(not rank(index, question).fits for question in spec["absent"])
            absent += len(spec["absent"])
    assert asked > 100
    assert first > 0.75 * asked
    assert doubted < 0.15 * asked
    assert recognised > 0.6 * absent
