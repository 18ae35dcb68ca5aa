"""The Jinja environment that chat templates are written for: what transformers' apply_chat_template provides.

Only the worker process imports this module. The sandbox keeps a template from Python's objects; it bounds neither time
nor memory, which is why the worker exists.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; it renders as its body.

    A scope keeps `{% set %}` local to the block, as in transformers, which calls the body as a macro.
    """

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja's Extension declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainDict:
    """The global `dict`: a callable that makes dictionaries without exposing the type itself to the template."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)


class PlainNamespace(Namespace):
    """The global `namespace`, whose attributes may not begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:
        # No named parameter, so that namespace(self=...) is an attribute like any other.
        self, *rest = args
        initial = dict(*rest, **attributes)
        for name in initial:
            _check_attribute(name)
        Namespace.__init__(self, initial)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attributes may not begin with an underscore, as {name[:80]!r} does")


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRuntimeError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Immutable except for `list.append` and `list.pop`, which Kimi's templates call: they can change only copies."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


ENVIRONMENT = ChatEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], cache_size=0
)
ENVIRONMENT.filters["tojson"] = _to_json
ENVIRONMENT.filters["from_json"] = json.loads  # llama.cpp has it, and some templates rely on it
ENVIRONMENT.globals.update(
    raise_exception=_raise_exception, strftime_now=_strftime_now, dict=PlainDict(), namespace=PlainNamespace
)
del ENVIRONMENT.globals["lipsum"]


@lru_cache(maxsize=4)
def compile_template(source: str) -> jinja2.Template:
    """The compiled template; raises jinja2.TemplateSyntaxError with the line."""
    return ENVIRONMENT.from_string(source)
