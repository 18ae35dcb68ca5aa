"""Grammars and schemas that would overflow the stack, never end, or fill the memory."""

import json
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gguf_io.interruption import CHECKPOINT
from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary, compile_constraint, trial
from localllm.engine.constraint.compile import enforced
from localllm.engine.constraint.trial import MAX_SOURCE_CHARACTERS
from localllm.errors import RequestError
from tests.fakes.byte_vocabulary import ByteVocabulary
from tests.systems import ON_WINE
from tests.waiting import eventually

VOCABULARY = ConstraintVocabulary(ByteVocabulary())
A = ord("a") + 1  # the token of "a"


def compiled(kind: str, source: str) -> Constraint:
    return compile_constraint(ConstraintKind(kind), source, VOCABULARY)


def lines(count: int, line: str, last: str) -> str:
    """line: with {} for a number and {n} for the next one."""
    return "\n".join([*(line.format(i, n=i + 1) for i in range(count)), last.format(count)])


def definitions(count: int, schema: Callable[[dict[str, str]], object], last: object) -> str:
    """A schema whose definitions refer to the next one each."""
    made = {f"d{i}": schema({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return json.dumps({"$defs": {**made, f"d{count}": last}, "$ref": "#/$defs/d0"})


def in_lark(schema: str) -> str:
    return f"start: %json {schema}"


# Each overflows a stack of 8 MiB. The last column: whether it is small enough to be compiled on a larger one.
CHAINS = {
    "GBNF rules": ("gbnf", lambda: "root ::= r0\n" + lines(4000, "r{} ::= r{n}", 'r{} ::= "a"'), True),
    "Lark rules as GBNF": ("gbnf", lambda: "start: r0\n" + lines(4500, "r{}: r{n}", 'r{}: "a"'), True),
    "Lark rules": ("lark", lambda: "start: r0\n" + lines(15_000, "r{}: r{n}", 'r{}: "a"'), False),
    "Lark terminals": ("lark", lambda: "start: T0\n" + lines(15_000, "T{}: T{n}", 'T{}: "a"'), False),
    "references in Lark": ("gbnf", lambda: in_lark(definitions(4900, lambda ref: ref, {"const": "a"})), True),
    "objects in Lark": (
        "lark",
        lambda: in_lark(definitions(3200, lambda ref: {"properties": {"a": ref}}, {"type": "null"})),
        True,
    ),
    "objects": (
        "json_schema",
        lambda: definitions(1200, lambda ref: {"properties": {"a": ref}, "required": ["a"]}, {"type": "null"}),
        True,
    ),
    "arrays": ("json_schema", lambda: definitions(1200, lambda ref: {"items": ref, "minItems": 1}, True), True),
}


@pytest.mark.parametrize("name", CHAINS)
def test_long_chains_are_compiled_or_refused(name: str) -> None:
    kind, source, fits = CHAINS[name]
    if not fits:
        with pytest.raises(RequestError, match=r"nested too deeply|takes too long"):
            compiled(kind, source())
        return
    constraint = compiled(kind, source())
    for _ in range(20):
        if constraint.is_finished:
            break
        constraint.accept(int(np.flatnonzero(constraint.mask())[0]))


NESTED = {
    "groups": ("gbnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "Lark groups": ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "pattern": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "values in Lark": ("lark", in_lark('{"const":' + "[" * 5000 + "]" * 5000 + "}")),
    "schemas in Lark": ("lark", in_lark('{"items":' * 5000 + "{}" + "}" * 5000)),
    "grammars in Lark": ("lark", "start: " + "%lark { start: " * 3000 + '"a"' + " }" * 3000),
    "schema": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "value": ("json_schema", '{"const":' + "[" * 5000 + "]" * 5000 + "}"),
    "pattern in a schema": ("json_schema", json.dumps({"type": "string", "pattern": "(" * 300 + "a" + ")" * 300})),
}


@pytest.mark.parametrize("name", NESTED)
def test_deep_nesting_is_refused_or_left_out(name: str) -> None:
    kind, source = NESTED[name]
    if name == "pattern in a schema":
        assert compiled(kind, source).mask()[ord('"') + 1]
        return
    with pytest.raises(RequestError):
        compiled(kind, source)


ENDLESS = {
    "patterns that must all match": (
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(40)]}),
    ),
    "the same in Lark": (
        "lark",
        in_lark(json.dumps({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(40)]})),
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_work_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CPU_SECONDS", 1.0)
    with pytest.raises(RequestError, match=r"takes too (long|much memory)"):
        compiled(*ENDLESS[name])
    assert compiled("regex", "a").mask()[A]  # the next one is not affected


def test_grammars_of_the_greatest_size_are_allowed_and_longer_ones_refused() -> None:
    source = 'root ::= "a" #'
    assert compiled("gbnf", source.ljust(MAX_SOURCE_CHARACTERS, "x")).mask()[A]
    for kind in ("gbnf", "lark", "regex", "json_schema"):
        with pytest.raises(RequestError, match=f"{MAX_SOURCE_CHARACTERS + 1} characters; at most"):
            compiled(kind, source.ljust(MAX_SOURCE_CHARACTERS + 1, "x"))


def test_parameters_of_tools_have_the_limits_of_schemas() -> None:
    with pytest.raises(RequestError, match="at most"):
        enforced({"a": {"description": "x" * MAX_SOURCE_CHARACTERS}})
    with pytest.raises(RequestError, match="more than 5000 schemas"):
        enforced({"a": {"anyOf": [{}] * 5000}})


@pytest.mark.skipif(ON_WINE, reason="Wine does not end a process at its job's limit of processor time")
def test_all_tools_of_a_request_share_one_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tool alone takes the child about a tenth of the limit."""
    monkeypatch.setattr(trial, "CPU_SECONDS", 1.0)
    patterns = ["|".join(f"w{tool}{word}[a-z]*" for word in range(9000)) for tool in range(30)]
    tools = {f"t{at}": {"type": "object", "properties": {"a": {"pattern": one}}} for at, one in enumerate(patterns)}
    assert enforced({"t0": tools["t0"]})["t0"]["properties"]["a"]["pattern"] == patterns[0]
    with pytest.raises(RequestError, match=r"The text of the tools cannot be used: it takes too long"):
        enforced(tools)


def test_any_number_of_tools_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = trial._CHILDREN.ask
    monkeypatch.setattr(trial._CHILDREN, "ask", lambda kind, *rest: (asked.append(kind), ask(kind, *rest))[1])
    tools = {f"tool {number}": {"type": "object", "properties": {f"p{number}": {"not": {}}}} for number in range(40)}
    for _ in range(2):
        found = enforced(tools)
        assert list(found) == list(tools)
        assert found["tool 7"]["properties"] == {"p7": False}
    assert asked == ["arguments"]


class ClientLeftError(Exception):
    """The work is not wanted any more."""


@pytest.fixture
def left() -> Iterator[threading.Event]:
    """Set it to cancel the work of this context."""
    gone = threading.Event()

    def check() -> None:
        if gone.is_set():
            raise ClientLeftError

    token = CHECKPOINT.set(check)
    yield gone
    CHECKPOINT.reset(token)


def test_work_ends_when_it_is_not_wanted_any_more(left: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    converse = trial._CHILDREN.ask

    def ask(*arguments: object) -> object:
        asked.set()
        return converse(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(trial._CHILDREN, "ask", ask)
    threading.Thread(target=lambda: (eventually(asked.is_set), left.set()), daemon=True).start()
    with pytest.raises(ClientLeftError):
        compiled("gbnf", "root ::= r0\n" + lines(12_000, "r{} ::= r{n}", 'r{} ::= "a"'))
