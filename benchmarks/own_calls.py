"""Counts the tool calls that a model makes by itself, without being forced: right tool, arguments that fit.

    python -m benchmarks.own_calls MODEL.gguf [--show] [--threads N]

Twelve requests, each of which one of the offered tools answers, at temperature 0. Two more ask for JSON that is no
call, and must be answered with text. Models such as Qwen2.5-Coder write calls without the markers of their template.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jsonschema

from localllm.answer.event import Answer
from localllm.answer.local import LocalModel
from localllm.answer.request import AnswerRequest
from localllm.placement.loaded_model import load_model
from localllm.settings import Settings


def tool(name: str, description: str, *required: str, **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's format."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


TOOLS = [
    tool(
        "get_weather",
        "Get the current weather of a city.",
        "city",
        city=text("The city"),
        unit={"enum": ["celsius", "fahrenheit"], "description": "The unit of temperatures"},
    ),
    tool("read_file", "Read a file.", "path", path=text("The file's path")),
    tool("run_command", "Run a shell command.", "command", command=text("The command")),
    tool(
        "write_file", "Write text to a file.", "path", "content", path=text("The file's path"), content=text("The text")
    ),
    tool("search_web", "Search the web.", "query", query=text("What to search for"), count={"type": "integer"}),
]
ASKED = [
    ("What is the weather in Oslo?", "get_weather"),
    ("Is it warm in Madrid today? Use Celsius.", "get_weather"),
    ("Tell me the temperature in Tokyo in fahrenheit.", "get_weather"),
    ("Show me what is in the file notes.txt.", "read_file"),
    ("Read src/main.py.", "read_file"),
    ("Read the file README.md.", "read_file"),
    ("Run the command ls.", "run_command"),
    ("Run the command pytest -q.", "run_command"),
    ("Run the command git status.", "run_command"),
    ("Create a file hello.txt with the text: Hello, world!", "write_file"),
    ("Search the web for the newest release of Python.", "search_web"),
    ("Find 3 web pages about black holes.", "search_web"),
]
NO_CALLS = [
    'Answer with exactly this JSON and nothing else: {"name": "Ada", "arguments": {"age": 36}}',
    "Write a JSON object with the keys name and age for a person called Bob, aged 40.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--show", action="store_true", help="print every answer")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    right = texts = 0
    with load_model(given.model, Settings(threads=given.threads)) as loaded:
        model = LocalModel(given.model.stem, loaded)
        for question, name in [*ASKED, *((question, None) for question in NO_CALLS)]:
            said = answer(model, question)
            if name is None:
                texts += not said.calls
            else:
                right += len(said.calls) == 1 and said.calls[0].name == name and fits(said)
            if given.show:
                calls = [(call.name, call.arguments) for call in said.calls]
                sys.stdout.write(f"{question}\n  {calls} {said.content!r}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{right} of {len(ASKED)} right calls; {texts} of {len(NO_CALLS)} texts stayed text\n")


def answer(model: LocalModel, question: str) -> Answer:
    messages = [{"role": "user", "content": question}]
    request = AnswerRequest(messages=messages, tools=TOOLS, sampling={"temperature": 0.0}, max_tokens=200)
    found = Answer()
    for event in model.prepare(request).submit():
        found.add(event)
    return found


def fits(said: Answer) -> bool:
    """Whether the call's arguments fit its tool's schema."""
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    return all(jsonschema.Draft202012Validator(schemas[call.name]).is_valid(call.arguments) for call in said.calls)


if __name__ == "__main__":
    main()
