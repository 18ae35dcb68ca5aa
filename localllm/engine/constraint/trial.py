"""Reads grammars and schemas in confined child processes, before this process compiles them.

llguidance recurses on the stack without a limit, and some expressions, such as an intersection of many patterns, take
it years. Neither can be told from the source, so a child with limits on time, memory and stack does the work first.
What it survives, this process compiles too, on a larger stack (`on_deep_stack`).
"""

import json
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from gguf_io.confined import ChildEndedError, ConfinedChildren, Reply
from localllm.errors import RequestError

MAX_SOURCE_CHARACTERS = 256 * 1024
MAX_TOOLS_CHARACTERS = 4 * 2**20  # of all tools of a request
CPU_SECONDS = 10.0
WALL_SECONDS = 40.0
MAX_MEMORY_BYTES = 2**30
MOST_AT_ONCE = 4  # children
STACK_BYTES = 32 * 2**20  # of the child; only what is used takes memory
KEPT = 16  # grammars that were tried last

T = TypeVar("T")

_CHILDREN = ConfinedChildren("localllm.engine.constraint.worker", MAX_MEMORY_BYTES, MOST_AT_ONCE)
_STACKS = threading.Lock()  # threading.stack_size is one setting for all threads


@lru_cache(KEPT)
def tried_grammar(kind: str, source: str) -> tuple[str, tuple[str, ...]]:
    """llguidance's grammar for a constraint, and sentences on what it does not enforce. Raises RequestError."""
    reply = _ask(kind, source, f"The {kind} constraint")
    return reply["grammar"], tuple(reply["notes"])


@lru_cache(KEPT)
def tried_schema(source: str) -> tuple[str, tuple[str, ...]]:
    """As JSON, the part of a JSON Schema that a grammar can enforce; and the keywords that it leaves out.

    Raises RequestError; see json_schema.enforceable.
    """
    reply = _ask("schema", source, "The JSON Schema")
    return reply["schema"], tuple(reply["loosened"])


@lru_cache(KEPT)
def tried_tools(source: str) -> str:
    """The schemas of tools' arguments in plain form (plain_schema), by name, as JSON like the given ones.

    Raises RequestError if one is malformed.
    """
    return str(_ask("tools", source, "The text of the tools", MAX_TOOLS_CHARACTERS)["tools"])


@lru_cache(KEPT)
def tried_arguments(source: str) -> str:
    """The parts of tools' schemas that a grammar can enforce, by name, as JSON.

    source: [schemas by name, names of those whose objects are open]; see json_schema.enforceable.

    One limit of time holds for all tools. Raises RequestError.
    """
    return str(_ask("arguments", source, "The text of the tools", MAX_TOOLS_CHARACTERS)["arguments"])


def on_deep_stack(work: Callable[[], T]) -> T:
    """Run work on a thread with twice the child's stack; return its result or raise its error."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = started_with_stack(run, 2 * STACK_BYTES)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def started_with_stack(run: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """Start a thread with a stack of this size."""
    with _STACKS:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=run)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def _ask(kind: str, source: str, what: str, most: int = MAX_SOURCE_CHARACTERS) -> Reply:
    if len(source) > most:
        raise RequestError(f"{what} has {len(source)} characters; at most {most} are allowed.")
    try:
        reply = _CHILDREN.ask(kind, json.dumps(source).encode(), CPU_SECONDS, WALL_SECONDS)
    except ChildEndedError as error:
        raise RequestError(f"{what} cannot be used: {error}. Make it smaller or simpler.") from None
    except OSError as error:
        raise RequestError(f"{what} cannot be used: the process that reads it cannot start: {error}.") from error
    if "error" in reply:
        raise RequestError(reply["error"])
    return reply
