"""The built-in model's facts about localllm are true."""

import re

import pytest
import typer.main

from benchmarks.training.corpus import TITLE_PROMPT
from benchmarks.training.tables import table
from localllm.chats import conversation
from localllm.cli import main as command_line
from localllm.settings import Settings
from tui.commands.table import COMMANDS, find_command
from tui.main import COMMANDS as CHAT_COMMANDS

ANSWERS = [row["answer"] for row in table("help")["help"]] + [
    row["answer"] for row in table("small_talk")["talk"] if "answer" in row
]
CODE = re.compile(r"`([^`]+)`")
CLI = typer.main.get_command(command_line.application({**CHAT_COMMANDS, **command_line.COMMANDS})).commands  # type: ignore[attr-defined]


def spans() -> list[str]:
    return [span for answer in ANSWERS for span in CODE.findall(answer)]


def test_there_are_answers_to_check() -> None:
    assert len(spans()) > 60


@pytest.mark.parametrize("span", sorted({span for span in spans() if "localllm " in span and "/localllm" not in span}))
def test_commands_exist_with_their_flags(span: str) -> None:
    command, *rest = span.split("localllm ", 1)[1].split()
    if command == "--help":
        return
    flags = {flag for parameter in CLI[command].params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in rest if word.startswith("-")} <= flags


@pytest.mark.parametrize("span", sorted({span for span in spans() if span.startswith("--")}))
def test_flags_alone_exist_somewhere(span: str) -> None:
    flags = {flag for command in CLI.values() for parameter in command.params for flag in parameter.opts}
    assert span.split()[0] in flags


@pytest.mark.parametrize("span", sorted({span for span in spans() if re.fullmatch(r"/[a-z]+", span)}))
def test_slash_commands_exist(span: str) -> None:
    assert find_command(span)


@pytest.mark.parametrize("name", ["new", "sessions", "copy", "help", "inspect", "models", "parameters"])
def test_keys_are_the_chat_s(name: str) -> None:
    key = next(command.key for command in COMMANDS if command.name == name)
    spelled = "+".join(part.capitalize() for part in key.split("+"))
    words = {"new": "`/new`", "sessions": "`/sessions`", "copy": "`/copy`", "models": "`/models`"}
    words |= {"help": "lists all keys", "inspect": "the inspector", "parameters": "temperature"}
    answers = [answer for answer in ANSWERS if words[name] in answer]
    assert answers
    assert any(spelled in answer for answer in answers)


def test_the_port_is_the_server_s() -> None:
    told = {port for answer in ANSWERS for port in re.findall(r"127\.0\.0\.1:(\d+)|(?<!-)[Pp]ort (\d{4,})", answer)}
    assert {port for pair in told for port in pair if port} == {str(Settings().port)}


def test_the_chat_asks_for_titles_in_the_words_that_were_learned() -> None:
    assert conversation.TITLE_PROMPT == TITLE_PROMPT
