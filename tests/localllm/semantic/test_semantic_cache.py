"""The semantic cache: which questions are one, what a server answers from its store, and how a threshold is chosen."""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from psutil import Process

from localllm.answer.request import AnswerRequest
from localllm.errors import RequestError, SettingsError
from localllm.semantic.facts import same_facts
from localllm.semantic.store import AnswerStore, SemanticCacheError
from localllm.semantic.threshold import QuestionPair, measure, read_pairs
from localllm.server.catalog import Catalog
from localllm.server.loading import MemoryLoader
from localllm.server.local_models import LocalModels
from localllm.server.models_manager import ModelManager
from localllm.server.options import server_options
from localllm.server.semantic import scope_of
from localllm.settings import Settings
from tests.localllm.server.conftest import StartServer, model_files, start_server
from tests.waiting import PATIENCE_S

__all__ = ["model_files", "start_server"]
EMBEDDER = "stories260K-Q8_0"
NOW = [1_000_000.0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I boil 2 eggs?", "How do I boil 3 eggs?"),
        ("How do I boil two eggs?", "How do I boil three eggs?"),
        ("Wie koche ich zwei Eier?", "Wie koche ich drei Eier?"),
        ("Is 1.5 more than 1.2?", "Is 1.5 more than 12?"),
        ("What is -5 squared?", "What is 5 squared?"),
        ("How much is $5?", "How much is 5?"),
        ("Is it safe to eat raw fish?", "Is it not safe to eat raw fish?"),
        ("Which birds can fly?", "Which birds can't fly?"),
        ("Which birds can fly?", "Which birds can\u2019t fly?"),
        ("Rezepte mit Milch", "Rezepte ohne Milch"),
        ("Is it possible to undo this?", "Is it impossible to undo this?"),
        ("Who is the mayor of Berlin?", "Who is the mayor of Hamburg?"),
        ("When did Henry IV die?", "When did Henry V die?"),
        ("Convert euros to dollars", "Convert dollars to euros"),
        ("Flights from Rome to Paris please", "Please find flights from Paris to Rome"),
        ("What is the highest hill?", "What is the lowest hill?"),
        ("Print `a` in Python", "Print `b` in Python"),
        ("Who wrote it?", "When was it written?"),
        ("Convert 3 miles to feet", "Convert 3 kilometers to feet"),
        ("Take 5 mg of it", "Take 5 g of it"),
        ("What happened in june 1944?", "What happened in july 1944?"),
        ("Quel temps fait-il en juin ?", "Quel temps fait-il en juillet ?"),
        ("When do they open, 5 am?", "When do they open, 5 pm?"),
        ("How many days are in a year?", "How many hours are in a year?"),
        ("All planets except Mars", "All planets and Mars"),
        ("Should I never feed it?", "Should I not feed it?"),
        ("sugar free cake", "sugar cake"),
        ("dont mix them", "mix them"),
        ("events since 2010", "events until 2010"),
        ("Is it rarely fatal?", "Is it often fatal?"),
        ("Backe glutenfreies Brot", "Backe Brot"),
        ("Welche Pilze sind giftig?", "Welche Pilze sind nicht giftig?"),
        ("Alle Länder außer Polen", "Alle Länder und Polen"),
        ("Wie alt sind einundzwanzig Hunde?", "Wie alt sind zweiundzwanzig Hunde?"),
        ("Wie kann ich es einschalten?", "Wie kann ich es ausschalten?"),
        ("Soll ich vor dem Essen baden?", "Soll ich nach dem Essen baden?"),
        ("Est-il permis de fumer ?", "N'est-il pas permis de fumer ?"),
        ("Il ne pleut jamais ici ?", "Il pleut ici ?"),
        ("Je veux un gâteau avec sucre", "Je veux un gâteau sans sucre"),
        ("Il faut vingt-deux œufs", "Il faut trente-deux œufs"),
        ("¿Puedo comerlo crudo?", "¿No puedo comerlo crudo?"),
        ("Czy to jest dobre?", "Czy to nie jest dobre?"),
        ("Это возможно?", "Это невозможно?"),
        ("这是安全的吗", "这不是安全的吗"),
        ("include the header", "exclude the header"),
        ("Paris weather", "London weather"),
        ("Solve for x", "Solve for y"),
        ("Is C faster than Rust?", "Is C++ faster than Rust?"),
        ("translate it to french", "translate it to german"),
        ("what is my name", "what is your name"),
        ("Who is the king?", "Who was the king?"),
        ("does a cat eat a mouse", "can a mouse eat a cat"),
    ],
)
def test_questions_that_differ_in_a_fact_are_two(one: str, other: str) -> None:
    assert not same_facts(one, other) and not same_facts(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I boil an egg?", "how do I boil an egg"),
        ("How do I boil 2 eggs?", "How can I boil 2 eggs?"),
        ("What is the capital city of France?", "Tell me, what is the capital of France?"),
        ("Why don't cats swim?", "Why do cats not swim?"),
        ("What's the capital of France?", "What is the capital city of France?"),
        ("What is the temperature of the sun?", "What temperature does the sun have?"),
        ("Explain tides in simple words", "Describe tides in simple words, please"),
        ("Wie koche ich Eier?", "Wie kann ich Eier kochen?"),
        ("Comment faire cuire un œuf ?", "Comment cuire un œuf ?"),
        ("Room \u0663", "room 3"),
    ],
)
def test_other_words_for_the_same_question_are_one(one: str, other: str) -> None:
    assert same_facts(one, other) and same_facts(other, one)


def vector(*values: float) -> Any:
    row = np.array(values, np.float32)
    return row / np.linalg.norm(row)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AnswerStore]:
    made = AnswerStore(tmp_path / "semantic.db", 10_000, ttl_s=60, clock=lambda: NOW[0])
    yield made
    made.close()


def test_the_nearest_question_of_a_scope_answers_if_no_fact_differs(store: AnswerStore) -> None:
    store.add("s", "m", "boil 2 eggs", vector(1, 0, 0), ("", "Two.", 7))
    store.add("s", "m", "boil 3 eggs", vector(1, 0.1, 0), ("", "Three.", 7))
    found = store.nearest("s", "boil 3 eggs please", vector(1, 0.05, 0), 0.9)
    assert found is not None and found[0].content == "Three." and found[1] > 0.99
    assert store.nearest("other", "boil 3 eggs", vector(1, 0.1, 0), 0.0) is None
    assert store.nearest("s", "boil 3 eggs", vector(0, 0, 1), 0.9) is None
    assert store.nearest("s", "boil 4 eggs", vector(1, 0, 0), 0.0) is None
    assert sorted(one.hits for one in store.entries()) == [0, 1]


def test_answers_end_with_their_time_and_the_least_used_go_first(store: AnswerStore) -> None:
    for number in range(40):
        NOW[0] += 0.1
        store.add("s", "m", f"question {number}", vector(1, number), ("", "x" * 200, 7))
    kept = store.entries()
    assert sum(one.bytes for one in kept) <= 10_000 and kept[0].question == "question 39"
    NOW[0] += 61
    assert store.entries() == []
    assert store.delete() == 0


def test_a_file_of_another_program_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "semantic.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(RequestError, match="another program"):
        AnswerStore(path, 10_000)
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused_and_closed(tmp_path: Path) -> None:
    (path := tmp_path / "damaged.db").write_bytes(b"no database" * 1000)
    with pytest.raises(SemanticCacheError, match="not a database") as caught:
        AnswerStore(path, 10_000)
    assert str(path) in str(caught.value) and str(path) not in {one.path for one in Process().open_files()}


def test_everything_but_the_words_makes_another_scope() -> None:
    system, hi = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    base = AnswerRequest(messages=[system, hi], sampling={"temperature": 0})
    others = [
        replace(base, namespace="bob"),
        replace(base, sampling={"temperature": 0, "top_k": 3}),
        replace(base, messages=[{"role": "system", "content": "Be long."}, hi]),
        replace(base, tools=[{"type": "function", "function": {"name": "x"}}]),
        replace(base, format="json"),
        replace(base, max_tokens=5),
        replace(base, think=True),
    ]
    scopes = [scope_of(one, "m") for one in (base, *others)] + [scope_of(base, "n")]
    assert len({*scopes}) == len(scopes)
    asked = replace(base, messages=[system, {"role": "user", "content": "Ho"}], client="x", priority=3)
    assert scope_of(asked, "m") == scopes[0]


def test_other_adapters_and_weights_make_another_scope(tmp_path: Path) -> None:
    file = tmp_path / "style.gguf"
    seen = set()
    for content, settings in [
        (b"", Settings()),
        (b"one", Settings(lora=f"{file}:0.5")),
        (b"one", Settings(lora=f"{file}:0.25")),
        (b"other", Settings(lora=f"{file}:0.5")),
    ]:
        if not file.exists() or file.read_bytes() != content:
            file.write_bytes(content)
            os.utime(file, (len(seen), len(seen)))
        models = LocalModels(
            Catalog([], settings),
            ModelManager(server_options(settings), MemoryLoader(settings)),
        )
        entry = models.find("builtin")
        assert models.identity(entry) not in seen
        seen.add(models.identity(entry))
    before = models.identity(entry)
    models.set_adapters(entry, [(0, 2.0)])
    assert models.identity(entry) not in seen
    models.set_adapters(entry, [(0, 0.5)])
    assert models.identity(entry) == before


def test_the_threshold_keeps_the_rate_of_false_hits() -> None:
    vectors = {"ash": vector(1, 0), "beech": vector(1, 0.1), "cedar": vector(1, 0.5), "dogwood": vector(1, 1)}
    vectors |= {"elm 1": vector(1, 0), "elm 2": vector(1, 0)}
    pairs = [
        QuestionPair("ash", "beech", True),
        QuestionPair("ash", "cedar", False),
        QuestionPair("ash", "dogwood", True),
        QuestionPair("elm 1", "elm 2", False),
    ]
    found = measure(pairs, lambda texts: np.array([vectors[text] for text in texts]), 0.0)
    assert 0.8944 < found.threshold < 0.8947
    assert (found.same, found.hits, found.different, found.false_hits, found.refused) == (2, 1, 2, 0, 1)
    assert measure(pairs, lambda texts: np.array([vectors[text] for text in texts]), 0.5).false_hits == 1


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '{"a": "x", "b": 3, "same": true}', '{"a": "x", "b": "y", "same": true}']
)
def test_a_wrong_file_of_pairs_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pairs").write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match="pairs"):
        read_pairs(tmp_path / "pairs")


def test_settings_are_checked() -> None:
    with pytest.raises(SettingsError, match="semantic_ttl"):
        server_options(Settings(semantic_ttl="soon"))
    with pytest.raises(SettingsError, match="semantic_cache"):
        server_options(Settings(semantic_cache="x", remote="http://host"))


@pytest.fixture(scope="module")
def http(start_server: StartServer) -> Iterator[httpx.Client]:
    with (
        start_server("--semantic-cache", EMBEDDER) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def ask(http: httpx.Client, question: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": question}]
    body = {"model": "builtin", "messages": messages, "temperature": 0, "seed": 1, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_server_answers_like_questions_from_its_store(http: httpx.Client) -> None:
    first = ask(http, "Tell me a story about a fox.")
    again = ask(http, "Tell me a story about a fox!")
    assert "x-semantic-cache" not in first.headers and again.headers["x-semantic-cache"].startswith("hit; cosine=")
    said, heard = (one.json()["choices"][0] for one in (first, again))
    assert heard["message"]["content"] == said["message"]["content"] and heard["finish_reason"] == "stop"
    assert "semantic cache" in heard["warnings"][0]
    usage = again.json()["usage"]
    assert usage["completion_tokens"] == 0 and usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert 'localllm_semantic_cache_total{result="hit"}' in http.get("/metrics").text


def test_a_hit_streams_in_every_protocol(http: httpx.Client) -> None:
    question = [{"role": "user", "content": "Tell me a story about a duck."}]
    for route, body in (
        ("/v1/chat/completions", {"messages": question, "temperature": 0}),
        ("/v1/messages", {"messages": question, "temperature": 0, "max_tokens": 900}),
        ("/v1/responses", {"input": question[0]["content"], "temperature": 0}),
        ("/api/chat", {"messages": question, "options": {"temperature": 0}}),
    ):
        asked = {"model": "builtin", **body}
        http.post(route, json={**asked, "stream": False})
        streamed = http.post(route, json={**asked, "stream": True})
        assert streamed.status_code == 200 and "x-semantic-cache" in streamed.headers, route
        assert "semantic cache" in streamed.text and len(streamed.text.splitlines()) > 5, route


@pytest.mark.parametrize("fields", [{"temperature": 0.5}, {"logprobs": True}, {"n": 2}])
def test_other_requests_are_computed(http: httpx.Client, fields: dict[str, Any]) -> None:
    for _ in range(2):
        assert "x-semantic-cache" not in ask(http, "Tell me a story about a goat.", **fields).headers


def test_later_questions_of_a_conversation_are_computed(http: httpx.Client) -> None:
    question = {"role": "user", "content": "Tell me a story about a goat."}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}, question]
    for _ in range(2):
        assert "x-semantic-cache" not in ask(http, "", messages=messages).headers


def test_another_number_and_another_system_text_are_computed(http: httpx.Client) -> None:
    ask(http, "Tell me a story about 2 cats.")
    assert "x-semantic-cache" not in ask(http, "Tell me a story about 3 cats.").headers
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story about 2 cats."}]
    assert "x-semantic-cache" not in ask(http, "", messages=system).headers
    assert "x-semantic-cache" in ask(http, "Tell me a story about 2 cats.").headers


def test_another_embedding_model_of_the_same_name_begins_anew(
    start_server: StartServer, model_files: Path, tmp_path: Path
) -> None:
    """Vectors of two models cannot be compared, even if they have as many numbers."""
    embedder, found = tmp_path / "embedder.gguf", []
    flags = ("--semantic-cache", "embedder", "--model", str(embedder))
    for source in (EMBEDDER, EMBEDDER, "stories260K-F32"):
        shutil.copyfile(model_files / f"{source}.gguf", embedder)
        with (
            start_server(*flags, models=(), XDG_CACHE_HOME=str(tmp_path / "cache")) as server,
            httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        ):
            found.append("x-semantic-cache" in ask(client, "Tell me a story about an owl.").headers)
    assert found == [False, True, False]
