"""The built-in model itself, on our CPU engine: its file, its stories, its answers. Greedy, or with fixed seeds."""

import re
from collections.abc import Iterator

import pytest

from gguf_io import open_model
from localllm.placement.loaded_model import LoadedModel, load_model
from models.builtin import path
from tests.models.builtin.conversations import SETTINGS, ask

SUBJECTS = """a brave fox|an old clock|the moon|a hungry bear|a clever queen|a robot|a lonely lighthouse|an astronaut
the sea|a blue flonk|a girl named Zoe|a pirate|a tired baker|a silver spoon""".replace("\n", "|").split("|")


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    with load_model(path(), SETTINGS) as loaded:
        yield loaded


def said(model: LoadedModel, *questions: str, temperature: float = 0.0, seed: int = 1) -> str:
    """The last answer; every answer must have ended by itself."""
    answers = ask(model, questions, temperature=temperature, seed=seed)
    assert all(ended for _, ended in answers), answers
    return answers[-1][0]


def check_sentences(text: str) -> None:
    """Sentences begin with capitals, quotes are closed, the text ends with punctuation."""
    assert re.match(r"[A-Z\"]", text)
    assert text.rstrip()[-1] in '.!?"', text
    assert text.count('"') % 2 == 0, text
    assert all(letter.isupper() for letter in re.findall(r"[.!?] \"?([A-Za-z])", text)), text
    assert not re.search(r"\b(\w+) \1\b", text), text


def test_the_file_is_what_the_card_says() -> None:
    assert path().stat().st_size <= 8 * 1024 * 1024
    with open_model(path()) as file:
        metadata = file.metadata
        assert metadata.get_str("general.architecture") == "llama"
        assert metadata.get_str("general.license") == "Apache-2.0"
        assert "demonstration" in metadata.get_str("general.description")
        for key in ("embedding_length", "feed_forward_length", "context_length"):
            assert metadata.get_int(f"llama.{key}") % 256 == 0
        assert "<|im_start|>" in metadata.get_str("tokenizer.chat_template")


def check_story(text: str) -> None:
    """A whole story, in which only characters introduced by name speak."""
    check_sentences(text)
    assert 40 <= len(text.split()) <= 250
    introduced = set(re.findall(r"named ([A-Z]\w+)", text))
    assert introduced, text
    assert set(re.findall(r"(?:asked|said|called) ([A-Z]\w+)", text)) <= introduced, text


@pytest.mark.parametrize("subject", SUBJECTS)
def test_stories_keep_their_subject(model: LoadedModel, subject: str) -> None:
    text = said(model, f"Tell me a story about {subject}")
    check_story(text)
    assert subject.split()[-1] in text.split(".")[0], text


@pytest.mark.parametrize("seed", [13, 20, 12])
def test_drawn_stories_are_whole_too(model: LoadedModel, seed: int) -> None:
    subject = {13: "a hungry bear", 20: "the sea", 12: "the north wind"}[seed]
    text = said(model, f"Tell me a story about {subject}", temperature=0.8, seed=seed)
    check_story(text)
    assert subject in text, text


def test_stories_go_on_and_change(model: LoadedModel) -> None:
    first = "Tell me a story about a brave fox"
    story = said(model, first)
    hero = re.search(r"named ([A-Z]\w+)", story)
    assert hero is not None
    for request in ("What happened next?", "Make it sad", "Who was in the story?"):
        answer = said(model, first, request)
        check_sentences(answer)
        assert hero[1] in answer, answer
        assert answer != story
    assert "moon" in said(model, first, "Tell another about the moon")


@pytest.mark.parametrize(
    ("question", "needed"),
    [
        ("How do I start the chat?", "localllm chat"),
        ("What port does the server listen on?", "11434"),
        ("How do I pull a model?", "localllm pull"),
        ("How do I list my models?", "localllm list"),
        ("How do I start the server?", "localllm serve"),
        ("How can I stop the answer?", "Esc"),
        ("Where are my chats stored?", "sessions.db"),
        ("How do I quantise a model?", "localllm quantize"),
        ("How do I use it from Python?", "http://127.0.0.1:11434/v1"),
        ("What are you?", "demonstration model"),
        ("What is the capital of France?", "localllm pull"),
    ],
)
def test_answers_name_the_right_thing(model: LoadedModel, question: str, needed: str) -> None:
    assert needed in said(model, question)
