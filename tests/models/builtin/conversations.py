"""Conversations with the built-in model, for the tests and for the samples of its card.

python -m tests.models.builtin.conversations > models/builtin/SAMPLES.md
"""

import sys
from collections.abc import Sequence

from localllm.answer.rendering import render
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.placement.loaded_model import LoadedModel, load_model
from localllm.settings import Settings
from models.builtin import path

SETTINGS = Settings(backend="native", threads=1, kv_mib=64, disk_cache=False)
MAX_TOKENS = 400

STORIES = """a brave fox|an old clock|the moon|a shy zimble|friendship|a girl named Zoe|a dragon who wants to fly
a robot in the desert|a cat and an owl|penguins|a little boat|the north wind|a hungry bear|a clever queen|Finn
a purple teapot|a lonely lighthouse|an astronaut|a snail who was always late|the sea""".replace("\n", "|").split("|")

QUESTIONS = """How do I start the chat?|How can I download a bigger model?|Which port does the server use?
How do I stop an answer?|Where are my chats stored?|How do I list my models?|How do I quantise a model?
How can I use it from Python?|What is a context?|What are you?|How do I start the server?|How do I delete a model?
What is the capital of France?|Hello!|Can it use my GPU?""".replace("\n", "|").split("|")

TALKS = [
    ["Tell me a story about a brave fox", "What happened next?", "Who was in the story?"],
    ["Tell me a story about a small mouse", "Make it sad", "How did it end?"],
    ["Tell me a story about a wizard", "Make it shorter"],
    ["Tell me a story", "Tell another about the moon"],
    ["Hi", "Tell me a funny story about a goat", "Thank you!"],
    ["Please tell me a bedtime story about a kitten", "What was the kitten called?"],
    ["A scary story about a ghost", "Where did the ghost live?", "And then?"],
    ["Tell me a sad story about a snowman", "Give it a happy ending"],
    ["Write a short story about a blue whale", "Make it longer"],
    ["Tell me a story about a pirate", "What did the pirate want?", "Who helped?"],
    ["How do I pull a model?", "And which one is good?"],
    ["What is localllm?", "How do I run the server?", "Which port is it?"],
    ["Tell me a story about a gentle giant", "How do I save this chat?", "What happened next?"],
    ["Write a Python program that sorts a list", "Then tell me a story about a snake"],
    ["Tell me a story about a shy dragon", "Give it a title", "What is the moral?"],
]


def ask(model: LoadedModel, questions: Sequence[str], *, temperature: float, seed: int) -> list[tuple[str, bool]]:
    """The answers to consecutive questions, and whether each ended by itself."""
    messages: list[dict[str, str]] = []
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = render(model, messages)
        sampling = SamplingParams(temperature=temperature, seed=seed)
        request = GenerationRequest(prompt.tokens, sampling, max_tokens=MAX_TOKENS, stop=model.template.stop_strings)
        done = model.engine.submit(request).collect()
        messages.append({"role": "assistant", "content": done.text})
        answers.append((done.text, done.last.finish_reason is FinishReason.STOP))
    return answers


def main() -> None:
    """Print fifty conversations as Markdown, with the default sampling and their numbers as seeds."""
    asked = (
        [[f"Tell me a story about {subject}"] for subject in STORIES] + [[question] for question in QUESTIONS] + TALKS
    )
    sys.stdout.write("# Fifty samples\n\nTemperature 0.8, top-k 40, top-p 0.95, min-p 0.05; the number is the seed.\n")
    with load_model(path(), SETTINGS) as model:
        for seed, questions in enumerate(asked, 1):
            answers = ask(model, questions, temperature=0.8, seed=seed)
            sys.stdout.write(f"\n## {seed}\n")
            for question, (answer, ended) in zip(questions, answers, strict=True):
                sys.stdout.write(
                    f"\n> {question}\n\n{answer}{'' if ended else ' (cut at ' + str(MAX_TOKENS) + ' tokens)'}\n"
                )


if __name__ == "__main__":
    main()
