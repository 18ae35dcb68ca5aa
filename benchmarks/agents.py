"""Replays sessions of coding agents: how many tokens are computed, how many are new, and the same for llama.cpp.

    agents.py MODEL.gguf [--turns 40] [--system 2500] [--tools 24] [--compact 9000] [--kv-mib 160] [--threads 2]
        [--llama-server PROGRAM | --peer PYTHON] [--seed 0]

A session has the shape of real ones, with random words: a system text of several blocks, the first of which changes
with every request and is meaningless; tools with schemas; turns with one call or several at once and their results;
sub-agents with a system text of their own, two at a time; a compaction to a summary whenever the conversation exceeds
--compact tokens; other chats in between, which fill the cache; a restart of the server in the middle; and a second
session of the same program in the last quarter. Requests go to /v1/messages, and each generates one token.

New tokens are those after the longest prefix that any earlier prompt had, without the meaningless block: what a cache
of any size would have to compute. The peer gets the same: llama-server, or llama-cpp-python's server run by the
interpreter that --peer names. The latter gets the same conversation at /v1/chat/completions, with the changing block,
and its log says how many tokens it computes.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engine_tools import table
from benchmarks.servers import Server, llama_cpp, llama_server, localllm
from gguf_io import load_chat_template, load_tokenizer, open_model
from localllm.answer.rendering import RenderedChat
from localllm.engine.prefix_cache import common_prefix
from localllm.server.anthropic.requests import BILLING, CountBody, conversation

NOUNS = ("file", "test", "module", "function", "branch", "error", "value", "report", "line", "build", "field", "folder")
VERBS = ("read", "check", "change", "explain", "move", "keep", "compare", "split", "join", "name", "count", "open")
CONTEXT = 32768
ONE_BY_ONE = threading.Lock()
Body = dict[str, Any]


class Words:
    """Random sentences, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, words: int) -> str:
        made = [self._random.choice((*NOUNS, *VERBS, "the", "a", "every", "before", "with")) for _ in range(words)]
        return " ".join(made) + "."

    def number(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def tool(self, name: str) -> Body:
        properties = {
            f"{self._random.choice(NOUNS)}_{at}": {"type": "string", "description": self.text(12)} for at in range(3)
        }
        schema = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
        return {"name": name, "description": self.text(60), "input_schema": schema}


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that are sent at once; none means a restart of the server. kind: for the table."""

    kind: str
    bodies: Sequence[Body] = ()


@dataclass(slots=True)
class Agent:
    """A program's side of a session: each turn sends the whole conversation so far."""

    words: Words
    system: str
    tools: list[Body]
    version: int = 0
    messages: list[Body] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def work(self, calls: int) -> None:
        """Add what the model would have answered, and the results of its calls."""
        ids = [f"toolu_{len(self.messages)}_{at}" for at in range(calls)]
        uses = [
            {"type": "tool_use", "id": one, "name": self.tools[self.words.number(0, len(self.tools) - 1)]["name"]}
            | {"input": {"path": self.words.text(4)}}
            for one in ids
        ]
        results = [
            {"type": "tool_result", "tool_use_id": one, "content": self.words.text(self.words.number(20, 200))}
            for one in ids
        ]
        self.messages.append({"role": "assistant", "content": [{"type": "text", "text": self.words.text(12)}, *uses]})
        self.messages.append({"role": "user", "content": results})

    def compact(self) -> None:
        """Continue from a summary."""
        self.messages = [{"role": "user", "content": f"What was done so far: {self.words.text(150)}"}]

    def body(self) -> Body:
        header = f"{BILLING} version=1.{self.version:03x}; cch={self.words.number(0, 16**5):05x};"
        blocks = [
            {"type": "text", "text": text} for text in (header, "You are an agent that works on code.", self.system)
        ]
        return {"system": blocks, "tools": self.tools, "messages": list(self.messages), "max_tokens": 1}


def session(arguments: argparse.Namespace, length: Callable[[Body], int]) -> Iterator[Step]:
    """The steps of a session. length: tokens of a body's prompt."""
    words = Words(arguments.seed)
    tools = [words.tool(f"tool_{at}") for at in range(arguments.tools)]
    agent = Agent(words, words.text(arguments.system), tools, words.number(0, 4095))
    helper = words.text(arguments.system // 3)
    agent.ask(words.text(30))
    for turn in range(1, arguments.turns + 1):
        yield Step("turn", [agent.body()])
        agent.work(words.number(2, 3) if turn % 4 == 0 else 1)
        if turn % 8 == 0:
            helpers = [Agent(words, helper, tools[: len(tools) // 2], agent.version) for _ in range(2)]
            for one in helpers:
                one.ask(words.text(60))
            for _ in range(3):
                yield Step("sub-agents", [one.body() for one in helpers])
                for one in helpers:
                    one.work(1)
        if turn % 5 == 0:
            yield Step("other chat", [{"messages": [{"role": "user", "content": words.text(1500)}], "max_tokens": 1}])
        if turn % 10 == 0:
            agent.ask(words.text(20))
        if length(agent.body()) > arguments.compact:
            agent.ask("Sum up what was done so far.")
            yield Step("compaction", [agent.body()])
            agent.compact()
        if turn == arguments.turns // 2:
            yield Step("restart")
        if turn == arguments.turns * 3 // 4:
            agent = Agent(words, agent.system, tools, words.number(0, 4095))
            agent.ask(words.text(30))


class Prompts:
    """The prompt tokens of bodies, and how many of them are new."""

    def __init__(self, model: Path) -> None:
        with open_model(model) as file:
            self._tokenizer, self._template = load_tokenizer(file), load_chat_template(file)
        self._known: list[tuple[int, ...]] = []

    def tokens(self, body: Body) -> tuple[int, ...]:
        asked = conversation(CountBody(model="m", **{key: value for key, value in body.items() if key != "max_tokens"}))
        options = {"tools": asked["tools"] or None, "enable_thinking": None}
        return RenderedChat(self._tokenizer, self._template, asked["messages"], options).tokens

    def new(self, bodies: Sequence[Body]) -> list[int]:
        """New tokens of each request: those that neither an earlier one nor another of these has computed."""
        found = []
        for body in bodies:
            tokens = self.tokens(body)
            found.append(len(tokens) - max((common_prefix(tokens, one) for one in self._known), default=0))
            self._known.append(tokens)
        return found


@dataclass(slots=True)
class Tally:
    """Totals of the requests of one kind. refused: responses other than 200."""

    requests: int = 0
    prompt: int = 0
    new: int = 0
    computed: int = 0
    refused: int = 0
    seconds: float = 0.0


def ask(server: Server, body: Body) -> tuple[int, int, bool]:
    """A prompt's tokens, how many were computed, and whether it was refused."""
    if server.name == "llama-cpp-python":
        return ask_in_chat(server, body)
    response = httpx.post(f"{server.url}/v1/messages", json={**body, "model": server.model}, timeout=3600)
    if response.status_code != httpx.codes.OK:
        sys.stderr.write(f"{server.name} refuses: {response.text[:500]}\n")
        return 0, 0, True
    usage = response.json()["usage"]
    known = usage.get("cache_read_input_tokens", 0)
    return usage["input_tokens"] + known, usage["input_tokens"], False


def ask_in_chat(server: Server, body: Body) -> tuple[int, int, bool]:
    """The same for llama-cpp-python's server, which answers one request after another."""
    # A space before the changing block keeps it in the text, as in any server that does not recognize it.
    shown = {**body, "system": [{**block, "text": f" {block['text']}"} for block in body.get("system", ())]}
    asked = conversation(CountBody(model="m", **{key: value for key, value in shown.items() if key != "max_tokens"}))
    for message in asked["messages"]:
        for called in message.get("tool_calls", ()):
            called["function"]["arguments"] = json.dumps(called["function"]["arguments"])
    request = {"model": server.model, "max_tokens": 1, "messages": asked["messages"], "tools": asked["tools"] or None}
    with ONE_BY_ONE:
        before = os.fstat(server.log.fileno()).st_size
        response = httpx.post(f"{server.url}/v1/chat/completions", json=request, timeout=3600)
        if response.status_code != httpx.codes.OK:
            sys.stderr.write(f"{server.name} refuses: {response.text[:500]}\n")
            return 0, 0, True
        prompt = response.json()["usage"]["prompt_tokens"]
        told = re.findall(r"prefix-match hit, remaining (\d+) prompt tokens", server.said(before))
    return prompt, int(told[-1]) if told else prompt, False


def replay(
    steps: Sequence[Step], new: Sequence[Sequence[int]], start: Callable[[], AbstractContextManager[Server]]
) -> dict[str, Tally]:
    """Send a session to a server, restarting it where a step says so; return tallies by kind of step."""
    tallies: dict[str, Tally] = {}
    at = 0
    with ThreadPoolExecutor() as pool:
        while at < len(steps):
            with start() as server:
                while at < len(steps) and steps[at].bodies:
                    step, began = steps[at], time.monotonic()
                    answers = list(pool.map(lambda body: ask(server, body), step.bodies))
                    tally = tallies.setdefault(step.kind, Tally())
                    tally.seconds += time.monotonic() - began
                    tally.requests += len(answers)
                    tally.new += sum(new[at])
                    for prompt, computed, refused in answers:
                        tally.prompt += prompt
                        tally.computed += computed
                        tally.refused += refused
                    at += 1
            at += 1
    return tallies


def report(name: str, tallies: dict[str, Tally]) -> None:
    """Print the table of a server."""
    total = Tally()
    for tally in tallies.values():
        for part in Tally.__slots__:
            setattr(total, part, getattr(total, part) + getattr(tally, part))
    rows: list[list[object]] = []
    for kind, one in (*tallies.items(), ("all", total)):
        rows.append([name, kind, one.requests, one.prompt, one.new, one.computed])
        rows[-1] += [one.computed / max(one.new, 1), one.refused, one.seconds]
    headings = (
        "server",
        "requests for",
        "number",
        "prompt tokens",
        "new",
        "computed",
        "computed / new",
        "refused",
        "s",
    )
    table(headings, rows)


def main() -> None:
    """Parse the command line, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name, value in (("turns", 40), ("system", 2500), ("tools", 24), ("compact", 9000), ("kv-mib", 160)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--peer", metavar="PYTHON")
    arguments = parser.parse_args()
    prompts = Prompts(arguments.model)
    steps = list(session(arguments, lambda body: len(prompts.tokens(body))))
    new = [prompts.new(step.bodies) for step in steps]
    with tempfile.TemporaryDirectory() as home:
        report(
            "localllm",
            replay(
                steps,
                new,
                lambda: localllm(arguments.model, arguments.threads, arguments.kv_mib, home=Path(home)),
            ),
        )
    threads, program, python = arguments.threads, arguments.llama_server, arguments.peer
    if program:
        report("llama-server", replay(steps, new, lambda: llama_server(program, arguments.model, threads, CONTEXT, 2)))
    elif python:
        talks = ("--verbose", "true")
        report(
            "llama-cpp-python",
            replay(steps, new, lambda: llama_cpp(python, arguments.model, threads, CONTEXT, talks)),
        )


if __name__ == "__main__":
    main()
