"""Translates Go chat templates to Jinja, which runs in the sandbox of all chat templates.

It translates what Ollama's templates use: text, fields, conditions, ranges, variables and comparison functions. A
template without .Messages is rendered once per turn, and the last turn ends at its .Response, as in Ollama
(https://github.com/ollama/ollama/blob/main/docs/template.mdx, https://pkg.go.dev/text/template).
"""

import json
import re
from collections.abc import Sequence

from localllm.library.errors import LibraryError
from localllm.text import shortened

# The content of an action up to its }}, which strings may also contain. Possessive, so that no text backtracks.
_ACTION = re.compile(
    r"""\s*+(?:/\*.*?\*/|-\s+/\*.*?\*/|)(?:[^"`}]|"(?:[^"\\]|\\.)*+"|`[^`]*+`|\}(?!\}))*+""", re.DOTALL
)
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|`[^`]*`)|(?P<number>-?\d+)|(?P<variable>\$\w*(?:\.\w+)*)'
    r"|(?P<field>(?:\.\w+)+|\.)|(?P<name>\w+)|(?P<close>\)(?:\.\w+)*)|(?P<mark>:=|=|\||\(|,))"
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


def translated(template: str) -> str:
    """A Go template as Jinja. Raises LibraryError naming what is not supported."""
    if len(template) > _LONGEST:
        raise LibraryError(f"The template has {len(template)} characters; at most {_LONGEST} are translated.")
    pieces = _pieces(template)
    if ".Messages" not in template and ".Response" not in template:
        pieces.append((True, ".Response"))
    whole, last = _Translation().of(pieces)
    if ".Messages" in template:
        return _ALL.replace("LAST", whole)
    return _TURNS.replace("LAST", last).replace("TURN", whole)


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


class _Translation:
    """Writes the pieces of a template as Jinja, one after another."""

    def __init__(self) -> None:
        self._jinja: list[str] = []
        self._up_to_answer: str | None = None
        self._open: list[tuple[str, str]] = []  # the open blocks: Jinja's word for each, and what . means outside of it
        self._dot = "R"
        self._loops = 0

    def of(self, pieces: Sequence[tuple[bool, str]]) -> tuple[str, str]:
        """The whole template, and the part of it before the first action that reads .Response."""
        for is_action, content in pieces:
            if not is_action:
                self._jinja.append(f"{{{{- {_quoted(content)} -}}}}")
            elif content.startswith("if "):
                self._begin("if", self._value(content[3:]))
            elif content.startswith("range "):
                self._range(content)
            elif re.match(r"(else|end)\b", content):
                self._branch(content)
            elif assigned := re.match(r"\$(\w+)\s*:?=\s*(.+)", content, re.DOTALL):
                self._set(assigned[1], self._value(assigned[2]))
            else:
                value = self._value(content)
                self._jinja.append(f"{{{{- {value} -}}}}")
        if self._open:
            raise LibraryError("The template has a block without its {{ end }}.")
        whole = "".join(self._jinja)
        return whole, whole if self._up_to_answer is None else self._up_to_answer

    def _value(self, source: str) -> str:
        """Translate an expression. At the first that reads the response, note the template up to the answer."""
        value = _expression(source, self._dot)
        if "R['Response']" in value and self._up_to_answer is None:
            ends = (f"{{%- end{word} -%}}" for word, _ in reversed(self._open))
            self._up_to_answer = "".join([*self._jinja, *ends])
        return value

    def _set(self, name: str, value: str) -> None:
        self._jinja.append(f"{{%- set V.{name} = {value} -%}}")

    def _begin(self, word: str, head: str) -> None:
        if len(self._open) == _DEEPEST:
            raise LibraryError(f"The template is nested deeper than {_DEEPEST} blocks.")
        self._open.append((word, self._dot))
        self._jinja.append(f"{{%- {word} {head} -%}}")

    def _range(self, content: str) -> None:
        names, _, source = content.removeprefix("range ").rpartition(":=")
        variables = [name.strip().removeprefix("$") for name in names.split(",") if name.strip()]
        if not all(name.isidentifier() for name in variables) or len(variables) > 2:
            raise _unsupported(content)
        self._loops += 1
        item = f"m{self._loops}"
        self._begin("for", f"{item} in {self._value(source)}")
        self._dot = item
        for name, value in zip(reversed(variables), (item, "loop.index0"), strict=False):
            if name != "_":
                self._set(name, value)

    def _branch(self, content: str) -> None:
        """An else or an end."""
        if not self._open:
            raise LibraryError(f"The template has {{{{ {shortened(content)} }}}} outside of a block.")
        word, self._dot = self._open[-1]
        if content == "end":
            self._jinja.append(f"{{%- end{word} -%}}")
            self._open.pop()
        elif content == "else":
            self._jinja.append("{%- else -%}")
        elif content.startswith("else if ") and word == "if":
            value = self._value(content[8:])
            self._jinja.append(f"{{%- elif {value} -%}}")
        else:
            raise _unsupported(content)


def _unsupported(source: str) -> LibraryError:
    return LibraryError(f"The template's {{{{ {shortened(source)} }}}} is not supported.")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _expression(source: str, dot: str) -> str:
    """A pipeline as Jinja."""
    tokens: list[tuple[str, str]] = []
    at = 0
    while source[at:].strip():
        match = _TOKEN.match(source, at)
        if match is None:
            raise _unsupported(source)
        kind = str(match.lastgroup)
        tokens.append((kind, match[kind]))
        at = match.end()
    reader = _Expression(tokens, dot, source)
    value = reader.pipeline(0)
    if reader.left:
        raise reader.error()
    return value


class _Expression:
    """Parses the tokens of one pipeline, each a name of a group of _TOKEN and its text."""

    def __init__(self, tokens: list[tuple[str, str]], dot: str, source: str) -> None:
        self.left = tokens
        self._dot = dot
        self._source = source

    def error(self) -> LibraryError:
        """The error for a pipeline that is not supported."""
        return _unsupported(self._source)

    def pipeline(self, depth: int) -> str:
        """One or more commands; each takes the result of the one before as its last argument."""
        if depth > _DEEPEST:
            raise self.error()
        value = self._command(depth, None)
        while self.left and self.left[0] == ("mark", "|"):
            self.left.pop(0)
            value = self._command(depth, value)
        return value

    def _command(self, depth: int, piped: str | None) -> str:
        if not self.left:
            raise self.error()
        kind, name = self.left[0]
        if kind != "name" or name in _WORDS:
            if piped is not None:
                raise self.error()
            return self._operand(depth)
        self.left.pop(0)
        arguments: list[str] = []
        while self.left and self.left[0] != ("mark", "|") and self.left[0][0] != "close":
            arguments.append(self._operand(depth))
        return self._called(name, [*arguments, *([] if piped is None else [piped])])

    def _operand(self, depth: int) -> str:
        kind, text = self.left.pop(0)
        if kind == "number":
            return text
        if kind == "name" and text in _WORDS:
            return _WORDS[text]
        if kind == "text":
            return self._text(text)
        if kind == "variable":
            name, _, path = text.partition(".")
            return self._fields("R" if name == "$" else f"V.{name[1:]}", path)
        if kind == "field":
            return self._fields(self._dot, text[1:])
        if text != "(":
            raise self.error()
        value = self.pipeline(depth + 1)
        if not self.left or self.left[0][0] != "close":
            raise self.error()
        return self._fields(f"({value})", self.left.pop(0)[1][2:])

    def _text(self, source: str) -> str:
        if source.startswith("`"):
            return _quoted(source[1:-1])
        try:
            return _quoted(json.loads(source))
        except ValueError as error:
            raise self.error() from error

    def _fields(self, value: str, path: str) -> str:
        for name in path.split(".") if path else ():
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
