"""Sessions of coding agents replayed: how many tokens are computed, beside those that are new, and what llama.cpp does.

    agents.py MODEL.gguf [--turns 40] [--system 2500] [--tools 24] [--compact 9000] [--kv-mib 160] [--threads 2]
        [--llama-server PROGRAM] [--seed 0]

A session has the shape of the real ones, in words of its own: a system text of several blocks, the first of which
changes with every request and says nothing; tools with schemas; turns with one call or several at once and their
results; sub-agents with a system text of their own, two at a time; a compaction whenever the conversation has more than
so many tokens, which starts again from a summary; other chats in between, which fill the cache; and a restart of the
server in the middle. Requests go to /v1/messages, one token is generated for each.

New are the tokens behind the longest beginning that any earlier prompt had, without the block that says nothing: what a
cache of any size would have to compute. llama-server gets the same requests.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engine_tools import table
from benchmarks.servers import Server, llama_server, localllm
from gguf_io import load_chat_template, load_tokenizer, open_model
from localllm.answer.rendering import RenderedChat
from localllm.engine.prefix_cache import common_prefix
from localllm.server.anthropic.requests import BILLING, CountBody, conversation

NOUNS = ("file", "test", "module", "function", "branch", "error", "value", "report", "line", "build", "field", "folder")
VERBS = ("read", "check", "change", "explain", "move", "keep", "compare", "split", "join", "name", "count", "open")
CONTEXT = 32768
Body = dict[str, Any]


class Words:
    """Sentences that nobody wrote, the same for the same seed."""

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
    """Requests that are sent at once; none for a restart of the server. kind: for the table."""

    kind: str
    bodies: Sequence[Body] = ()


@dataclass(slots=True)
class Agent:
    """A program's side of a session: what it sends in each turn is all that was said so far."""

    words: Words
    system: str
    tools: list[Body]
    messages: list[Body] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def work(self, calls: int) -> None:
        """What the model would have answered, and the results of its calls."""
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
        """Go on from a summary."""
        self.messages = [{"role": "user", "content": f"What was done so far: {self.words.text(150)}"}]

    def body(self) -> Body:
        header = f"{BILLING} version={self.words.number(1, 10**9)}; {self.words.text(self.words.number(1, 6))}"
        blocks = [
            {"type": "text", "text": text} for text in (header, "You are an agent that works on code.", self.system)
        ]
        return {"system": blocks, "tools": self.tools, "messages": list(self.messages), "max_tokens": 1}


def session(arguments: argparse.Namespace, length: Callable[[Body], int]) -> Iterator[Step]:
    """The steps of a session. length: tokens of a body's prompt."""
    words = Words(arguments.seed)
    tools = [words.tool(f"tool_{at}") for at in range(arguments.tools)]
    agent = Agent(words, words.text(arguments.system), tools)
    helper = words.text(arguments.system // 3)
    agent.ask(words.text(30))
    for turn in range(1, arguments.turns + 1):
        yield Step("turn", [agent.body()])
        agent.work(words.number(2, 3) if turn % 4 == 0 else 1)
        if turn % 8 == 0:
            helpers = [Agent(words, helper, tools[: len(tools) // 2]) for _ in range(2)]
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


class Prompts:
    """The tokens of bodies, and how many of them are new."""

    def __init__(self, model: Path) -> None:
        with open_model(model) as file:
            self._tokenizer, self._template = load_tokenizer(file), load_chat_template(file)
        self._known: list[tuple[int, ...]] = []

    def tokens(self, body: Body) -> tuple[int, ...]:
        asked = conversation(CountBody(model="m", **{key: value for key, value in body.items() if key != "max_tokens"}))
        options = {"tools": asked["tools"] or None, "enable_thinking": None}
        return RenderedChat(self._tokenizer, self._template, asked["messages"], options).tokens

    def new(self, bodies: Sequence[Body]) -> list[int]:
        """For requests that are sent at once: what no earlier one and no other of them has."""
        found = []
        for body in bodies:
            tokens = self.tokens(body)
            found.append(len(tokens) - max((common_prefix(tokens, one) for one in self._known), default=0))
            self._known.append(tokens)
        return found


@dataclass(slots=True)
class Tally:
    """What requests of one kind took. refused: responses other than 200."""

    requests: int = 0
    prompt: int = 0
    new: int = 0
    computed: int = 0
    refused: int = 0
    seconds: float = 0.0


def ask(server: Server, body: Body) -> tuple[int, int, bool]:
    """A prompt's tokens, those that were computed, and whether it was refused."""
    response = httpx.post(f"{server.url}/v1/messages", json={**body, "model": server.model}, timeout=3600)
    if response.status_code != httpx.codes.OK:
        sys.stderr.write(f"{server.name} refuses: {response.text[:500]}\n")
        return 0, 0, True
    usage = response.json()["usage"]
    known = usage.get("cache_read_input_tokens", 0)
    return usage["input_tokens"] + known, usage["input_tokens"], False


def replay(
    steps: Sequence[Step], new: Sequence[Sequence[int]], start: Callable[[], AbstractContextManager[Server]]
) -> dict[str, Tally]:
    """Send a session to a server, which a restart ends and starts again; tallies by the kind of step."""
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
    if arguments.llama_server:
        report(
            "llama-server",
            replay(
                steps,
                new,
                lambda: llama_server(arguments.llama_server, arguments.model, arguments.threads, CONTEXT, slots=2),
            ),
        )


if __name__ == "__main__":
    main()
