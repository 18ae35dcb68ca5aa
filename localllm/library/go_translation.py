"""Translates Go chat templates to Jinja, which runs in the sandbox of all chat templates.

It translates what Ollama's templates use: text, fields, conditions, ranges, variables and comparison functions. A
template without .Messages is rendered once per turn, and the last turn ends at its .Response, as in Ollama
(https://github.com/ollama/ollama/blob/main/docs/template.mdx, https://pkg.go.dev/text/template).
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.library.errors import LibraryError
from localllm.text import shortened

# The content of an action up to its }}, which strings may also contain. Possessive, so that no text backtracks.
_ACTION = re.compile(
    r"""\s*+(?:/\*.*?\*/|-\s+/\*.*?\*/|)(?:[^"`}]|"(?:[^"\\]|\\.)*+"|`[^`]*+`|\}(?!\}))*+""", re.DOTALL
)
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|`[^`]*`)|(?P<number>-?\d+)|(?P<variable>\$\w*)(?P<of>(?:\.\w+)*)'
    r"|(?P<field>(?:\.\w+)+)|(?P<dot>\.)|(?P<name>\w+)|(?P<close>\))(?P<then>(?:\.\w+)*)|(?P<mark>:=|=|\||\(|,))"
)
_LONGEST = 64 * 1024
_DEEPEST = 50

# The fields that a template can read: of a request, and of a message.
_ROOT = frozenset({"System", "Prompt", "Response", "Messages", "Tools"})
_FIELDS = {
    "Role": "role",
    "Content": "content",
    "Thinking": "thinking",
    "ToolCalls": "tool_calls",
    "Function": "function",
    "Name": "name",
    "Arguments": "arguments",
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_WORDS = {"true": "true", "false": "false", "nil": "none"}

# A loop over turns for templates that read one prompt, and the whole conversation for those that read messages.
_TURNS = """{%- set T = namespace(turns=[], System='', Prompt='', Response='') -%}
{%- for m in messages -%}
{%- if (m.role == 'system' and (T.Prompt or T.Response)) or (m.role == 'user' and T.Response) -%}
{%- set T.turns = T.turns + [{'System': T.System, 'Prompt': T.Prompt, 'Response': T.Response}] -%}
{%- set T.System = '' -%}{%- set T.Prompt = '' -%}{%- set T.Response = '' -%}
{%- endif -%}
{%- if m.role == 'system' -%}{%- set T.System = m.content -%}
{%- elif m.role == 'user' -%}{%- set T.Prompt = m.content -%}
{%- elif m.role == 'assistant' -%}{%- set T.Response = m.content -%}{%- endif -%}
{%- endfor -%}
{%- set V = namespace() -%}
{%- for R in T.turns -%}TURN{%- endfor -%}
{%- set R = {'System': T.System, 'Prompt': T.Prompt, 'Response': T.Response} -%}LAST"""
_ALL = """{%- set S = namespace(text='') -%}
{%- for m in messages if m.role == 'system' -%}
{%- set S.text = S.text + ('\\n\\n' if S.text else '') + m.content -%}
{%- endfor -%}
{%- set V = namespace() -%}
{%- set R = {'System': S.text, 'Messages': messages, 'Tools': tools or [], 'Prompt': '', 'Response': ''} -%}LAST"""


@dataclass(slots=True)
class _Block:
    """An if or a range: the tags of its branches, their bodies, and the end tag."""

    tags: list[str] = field(default_factory=list)
    bodies: list[list[Any]] = field(default_factory=list)
    end: str = ""


@dataclass(frozen=True, slots=True)
class _Written:
    """The Jinja for one action or text. ends_turn: whether it is where the answer goes."""

    jinja: str
    ends_turn: bool = False


def translated(template: str) -> str:
    """A Go template as Jinja. Raises LibraryError naming what is not supported."""
    if len(template) > _LONGEST:
        raise LibraryError(f"The template has {len(template)} characters; at most {_LONGEST} are translated.")
    pieces = _pieces(template)
    if ".Messages" not in template and ".Response" not in template:
        pieces.append((True, ".Response"))
    nodes = _Parser(pieces).body("R", 0)
    if ".Messages" in template:
        return _ALL.replace("LAST", _joined(nodes))
    last = list(_up_to_answer(nodes, [False]))
    return _TURNS.replace("LAST", _joined(last)).replace("TURN", _joined(nodes))


def _pieces(template: str) -> list[tuple[bool, str]]:
    """Texts and actions in order, (is_action, content), trimmed as {{- and -}} say; without comments."""
    found: list[tuple[bool, str]] = []
    at, trims = 0, False
    while (opened := template.find("{{", at)) >= 0:
        action = _ACTION.match(template, opened + 2)
        closed = action.end() if action else opened
        if not template.startswith("}}", closed):
            raise LibraryError("The template has a {{ without its }}.")
        content, text = template[opened + 2 : closed], template[at:opened]
        text = text.lstrip() if trims else text
        if content[:1] == "-" and content[1:2].isspace():
            content, text = content[1:], text.rstrip()
        trims = content[-1:] == "-" and content[-2:-1].isspace()
        found += [(False, text), (True, (content[:-1] if trims else content).strip())]
        at = closed + 2
    found.append((False, template[at:].lstrip() if trims else template[at:]))
    return [piece for piece in found if piece[1] and not (piece[0] and piece[1].startswith("/*"))]


def _up_to_answer(nodes: Sequence[Any], found: list[bool]) -> Iterator[Any]:
    """The nodes up to where the answer goes; sets found[0] once that place is reached."""
    for node in nodes:
        if found[0]:
            return
        if isinstance(node, _Block):
            if any("R['Response']" in tag for tag in node.tags[:1]):
                found[0] = True
                return
            bodies = [list(_up_to_answer(body, found)) for body in node.bodies]
            yield _Block(node.tags, bodies, node.end)
        elif node.ends_turn:
            found[0] = True
        else:
            yield node


def _joined(nodes: Sequence[Any]) -> str:
    found: list[str] = []
    for node in nodes:
        if isinstance(node, _Block):
            for tag, body in zip(node.tags, node.bodies, strict=True):
                found += [tag, _joined(body)]
            found.append(node.end)
        else:
            found.append(node.jinja)
    return "".join(found)


class _Parser:
    """Parses the pieces of a template into Jinja nodes."""

    def __init__(self, pieces: Sequence[tuple[bool, str]]) -> None:
        self._pieces = pieces
        self._at = 0
        self._loops = 0

    def body(self, dot: str, depth: int) -> list[Any]:
        """The nodes up to an else, an end, or the end of the template, which is an error within a block."""
        if depth > _DEEPEST:
            raise LibraryError(f"The template is nested deeper than {_DEEPEST} blocks.")
        nodes: list[Any] = []
        while self._at < len(self._pieces):
            is_action, content = self._pieces[self._at]
            if is_action and re.match(r"(else|end)\b", content):
                if not depth:
                    raise LibraryError(f"The template has {{{{ {shortened(content)} }}}} outside of a block.")
                return nodes
            self._at += 1
            if not is_action:
                nodes.append(_Written(f"{{{{- {_quoted(content)} -}}}}"))
            elif content.startswith(("if ", "range ")):
                nodes.append(self._block(content, dot, depth))
            else:
                nodes.append(_written(content, dot))
        if depth:
            raise LibraryError("The template has a block without its {{ end }}.")
        return nodes

    def _block(self, content: str, dot: str, depth: int) -> _Block:
        word, _, rest = content.partition(" ")
        block, inner, before = _Block(end=f"{{%- end{'if' if word == 'if' else 'for'} -%}}"), dot, ""
        if word == "if":
            block.tags.append(f"{{%- if {_expression(rest, dot)} -%}}")
        else:
            self._loops += 1
            inner = f"m{self._loops}"
            names, _, source = rest.rpartition(":=")
            variables = [name.strip().removeprefix("$") for name in names.split(",") if name.strip()]
            if not all(name.isidentifier() for name in variables) or len(variables) > 2:
                raise LibraryError(f"The template's {{{{ {shortened(content)} }}}} is not supported.")
            values = ["loop.index0", inner][-len(variables) :] if variables else []
            pairs = [pair for pair in zip(variables, values, strict=True) if pair[0] != "_"]
            before = "".join(f"{{%- set V.{name} = {value} -%}}" for name, value in pairs)
            block.tags.append(f"{{%- for {inner} in {_expression(source, dot)} -%}}")
        while True:
            block.bodies.append([*([_Written(before)] if before else []), *self.body(inner, depth + 1)])
            before = ""
            if self._at >= len(self._pieces):
                raise LibraryError("The template has a block without its {{ end }}.")
            action = self._pieces[self._at][1]
            self._at += 1
            if action == "end":
                return block
            inner = dot
            if action == "else":
                block.tags.append("{%- else -%}")
            elif action.startswith("else if ") and word == "if":
                block.tags.append(f"{{%- elif {_expression(action[8:], dot)} -%}}")
            else:
                raise LibraryError(f"The template's {{{{ {shortened(action)} }}}} is not supported.")


def _written(content: str, dot: str) -> _Written:
    """An action that writes a value or sets a variable."""
    if assigned := re.match(r"\$(\w+)\s*:?=\s*(.+)", content, re.DOTALL):
        return _Written(f"{{%- set V.{assigned[1]} = {_expression(assigned[2], dot)} -%}}")
    value = _expression(content, dot)
    return _Written(f"{{{{- {value} -}}}}", ends_turn="R['Response']" in value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _expression(source: str, dot: str) -> str:
    """A pipeline as Jinja."""
    tokens: list[dict[str, str]] = []
    at = 0
    while source[at:].strip():
        match = _TOKEN.match(source, at)
        if match is None:
            raise LibraryError(f"The template's {{{{ {shortened(source)} }}}} is not supported.")
        tokens.append({name: value for name, value in match.groupdict().items() if value is not None})
        at = match.end()
    reader = _Expression(tokens, dot, shortened(source))
    value = reader.pipeline(0)
    if reader.left:
        raise reader.error()
    return value


class _Expression:
    """Parses the tokens of one pipeline."""

    def __init__(self, tokens: list[dict[str, str]], dot: str, source: str) -> None:
        self.left = tokens
        self._dot = dot
        self._source = source

    def error(self) -> LibraryError:
        """The error for a pipeline that is not supported."""
        return LibraryError(f"The template's {{{{ {self._source} }}}} is not supported.")

    def pipeline(self, depth: int) -> str:
        """One or more commands; each takes the result of the one before as its last argument."""
        if depth > _DEEPEST:
            raise self.error()
        value = self._command(depth, None)
        while self.left and self.left[0].get("mark") == "|":
            self.left.pop(0)
            value = self._command(depth, value)
        return value

    def _command(self, depth: int, piped: str | None) -> str:
        if not self.left:
            raise self.error()
        name = self.left[0].get("name")
        if name is None or name in _WORDS:
            if piped is not None:
                raise self.error()
            return self._operand(depth)
        self.left.pop(0)
        arguments: list[str] = []
        while self.left and self.left[0].get("mark") != "|" and "close" not in self.left[0]:
            arguments.append(self._operand(depth))
        return self._called(name, [*arguments, *([] if piped is None else [piped])])

    def _operand(self, depth: int) -> str:
        token = self.left.pop(0)
        word = token.get("number") or _WORDS.get(token.get("name", ""))
        if word:
            return word
        if "text" in token:
            return self._text(token["text"])
        if "variable" in token:
            root = token["variable"] == "$"
            return self._fields("R" if root else f"V.{token['variable'][1:]}", token.get("of", ""))
        if "field" in token or "dot" in token:
            return self._fields(self._dot, token.get("field", ""))
        if token.get("mark") != "(":
            raise self.error()
        value = self.pipeline(depth + 1)
        if not self.left or "close" not in self.left[0]:
            raise self.error()
        return self._fields(f"({value})", self.left.pop(0).get("then", ""))

    def _text(self, source: str) -> str:
        if source.startswith("`"):
            return _quoted(source[1:-1])
        try:
            return _quoted(json.loads(source))
        except ValueError as error:
            raise self.error() from error

    def _fields(self, value: str, path: str) -> str:
        for name in path.split(".")[1:]:
            known = name if value == "R" and name in _ROOT else None if value == "R" else _FIELDS.get(name)
            if known is None:
                raise LibraryError(f"The template reads .{shortened(name)}, which is not supported.")
            value = f"{value}['{known}']"
        return value

    def _called(self, name: str, arguments: list[str]) -> str:
        count = len(arguments)
        if name in ("and", "or") and arguments:
            return f"({f' {name} '.join(arguments)})"
        if name == "eq" and count > 2:
            return f"({arguments[0]} in [{', '.join(arguments[1:])}])"
        if name in _COMPARISONS and count == 2:
            return f"({arguments[0]} {_COMPARISONS[name]} {arguments[1]})"
        if name == "index" and count == 2:
            return f"{arguments[0]}[{arguments[1]}]"
        if name == "slice" and 2 <= count <= 3:
            return f"{arguments[0]}[{':'.join([*arguments[1:], ''][:2])}]"
        one = {"not": "(not {})", "len": "({}|length)", "json": "({}|tojson)"}.get(name)
        if one is None or count != 1:
            raise LibraryError(f"The template calls {shortened(name)} with {count} arguments, which is not supported.")
        return one.format(arguments[0])
