"""Questions about a folder: indexing, search and embedding, and the time to first token when questions overlap.

    documents.py [--files 10000] [--kib 6] [--pdf 0.02] [--embeddings MODEL.gguf] [--model MODEL.gguf]

The folder has random words of a fixed list, some of them rare, in Markdown, Python, HTML and PDF; the index is in a
temporary data folder. --embeddings embeds chunks for a minute. --model asks questions whose excerpts overlap, each with
a `localllm ask` process of its own and the disk cache.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import platformdirs

from cpu_kernels.kernel_cache import CACHE_VARIABLE
from localllm.settings import Settings
from localllm.text import human_bytes, table
from localllm.wings.documents.embeddings import MeaningSearch
from localllm.wings.documents.index import DocumentIndex
from localllm.wings.documents.search import find_excerpts
from tests.pdf_files import pdf_of

_COMMON = 4000
_EMBED_S = 60.0
_QUESTIONS = 50


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def word(number: int) -> str:
    """A word that is different for every number."""
    letters = "bcdfghjklmnprstvz"
    found = ""
    while number or not found:
        number, rest = divmod(number, len(letters) * 5)
        found += letters[rest // 5] + "aeiou"[rest % 5]
    return found


def make_folder(root: Path, files: int, kib: float, pdfs: float) -> list[str]:
    """Write the files; return a rare word of each."""
    source, rare = random.Random(1), []
    for number in range(files):
        words = [word(int(source.random() ** 3 * _COMMON)) for _ in range(int(kib * 1024 / 4.5))]
        rare.append(word(10**6 + number))
        words[len(words) // 2] = rare[-1]
        lines = [" ".join(words[at : at + 12]) for at in range(0, len(words), 12)]
        kind = "pdf" if source.random() < pdfs else ("md", "md", "py", "html")[number % 4]
        path = root / f"part{number % 100:02}" / f"{word(number)}.{kind}"
        path.parent.mkdir(exist_ok=True)
        if kind == "pdf":
            path.write_bytes(pdf_of([lines[at : at + 50] for at in range(0, len(lines), 50)]))
        else:
            tags = "<p>" if kind == "html" else "\n"
            path.write_text(tags.join("\n".join(lines[at : at + 8]) + "\n" for at in range(0, len(lines), 8)))
    return rare


def indexing(root: Path, rare: list[str], embeddings: Path | None) -> None:
    """Index, search and embed; print the times."""
    with DocumentIndex(root) as index:
        rows: list[tuple[object, ...]] = [("", "files", "read", "chunks", "seconds", "files/s")]

        def update(what: str) -> None:
            report = index.update()
            speed = f"{report.read / report.seconds:.0f}"
            rows.append((what, report.files, report.read, report.chunks, f"{report.seconds:.1f}", speed))
            for name, problem in list(report.problems.items())[:3]:
                say(f"{name}: {problem}")

        update("first")
        update("just after")  # files of the last two seconds are read again
        update("nothing changed")
        changed = sorted(root.rglob("*.md"))[:: max(len(rare) // 100, 1)]
        for path in changed:
            path.write_text(path.read_text() + "\nmore\n")
        update(f"{len(changed)} changed")
        say(table([tuple(map(str, row)) for row in rows]))
        say(f"index: {human_bytes(index.path.stat().st_size)}")
        source, took, hits = random.Random(2), [], 0
        for _ in range(_QUESTIONS):
            wanted = source.choice(rare)
            began = time.perf_counter()
            found = find_excerpts(index, f"Where does the text speak of {wanted}, and why {word(17)}?")
            took.append(time.perf_counter() - began)
            hits += any(wanted in excerpt.text for excerpt in found.excerpts)
        took.sort()
        say(f"{_QUESTIONS} questions: median {took[_QUESTIONS // 2] * 1e3:.1f} ms, slowest {took[-1] * 1e3:.1f} ms")
        say(f"the rare word is in an excerpt of {hits} of them")
        if embeddings is not None:
            with MeaningSearch(index, embeddings, Settings()) as meaning:
                tokens, left, seconds = meaning.embed_new(_EMBED_S, lambda _done, _total: True)
                began = time.perf_counter()
                meaning.nearest("Where is it?", 60, ())
                found_in = time.perf_counter() - began
            say(f"{embeddings.stem}: {tokens / seconds:.0f} tokens/s, {left} chunks left after {seconds:.0f} s")
            say(f"a question by meaning {found_in * 1e3:.0f} ms")


def asking(root: Path, rare: list[str], model: Path) -> None:
    """Ask in new processes; print the times to the first token."""
    questions = [
        ("first", f"What is {rare[0]} {word(700)} {word(800)}?"),
        ("the same again", f"What is {rare[0]} {word(700)} {word(800)}?"),
        ("the same excerpts", f"Explain briefly {word(800)} {rare[0]} {word(700)}!"),
        ("some of them", f"What is {word(700)} {rare[1]}?"),
    ]
    rows: list[tuple[object, ...]] = [("question", "prompt", "cached", "TTFT s")]
    for what, question in questions:
        command = [sys.executable, "-m", "localllm", "ask", str(root), question, "--model", str(model)]
        done = subprocess.run([*command, "--max-tokens", "8", "--json"], capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        rows.append((what, told["prompt_tokens"], told["cached_tokens"], f"{told['timings']['ttft_s']:.2f}"))
        time.sleep(2)  # KV is written to disk after the answer
    say(table([tuple(map(str, row)) for row in rows]))


def main() -> None:
    """Make a folder and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--kib", type=float, default=6)
    parser.add_argument("--pdf", type=float, default=0.02)
    parser.add_argument("--embeddings", type=Path)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    # Runs share compiled kernels, but not keys and values.
    os.environ.setdefault(CACHE_VARIABLE, platformdirs.user_cache_dir("localllm"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_DATA_HOME"] = os.environ["XDG_CACHE_HOME"] = str(Path(folder, "own"))
        root = Path(folder, "documents")
        root.mkdir()
        rare = make_folder(root, given.files, given.kib, given.pdf)
        size = sum(path.stat().st_size for path in root.rglob("*.*"))
        say(f"{given.files} files, {human_bytes(size)}, {os.cpu_count()} cores")
        indexing(root, rare, given.embeddings)
        if given.model is not None:
            asking(root, rare, given.model)


if __name__ == "__main__":
    main()
