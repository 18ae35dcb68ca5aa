"""How models write tool calls: a row for each family of chat templates.

A row is selected by texts that occur in the template. The grammar (`grammar`) and the reader (`reader`) are built from
it. Source of the formats: the families' chat templates, and the documentation of the models' vendors.
"""

# ruff: noqa: RUF001 - DeepSeek's tokens are made of such characters

import re
from dataclasses import dataclass
from enum import Enum


class Slot(Enum):
    """A place in a call that depends on the tool: its name, or arguments as a JSON object."""

    NAME = "name"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that matches a regular expression, in the syntax that Python and Rust share."""

    source: str


class Maybe(tuple["Piece", ...]):
    """Pieces that may be missing."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments one by one, each between tags; strings are written raw, other values as JSON.

    opening, closing: with {key} for the parameter's name, {type} for its JSON type and {string} for whether it is text.
    """

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class Literals:
    """Arguments as key and value pairs, in another spelling than JSON's.

    quotes: around strings; within double quotes they are escaped as in JSON, within others not at all. assigns,
    nested_assigns: between key and value, at the top and in nested objects, whose keys have quotes only with
    quoted_keys. words: true, false, null. closing: the text after the arguments, not part of them.
    """

    quotes: str
    assigns: str
    nested_assigns: str
    quoted_keys: bool
    words: tuple[str, str, str]
    closing: str


# Text: a space that is not before a letter may be white space or nothing.
Piece = str | Slot | Pattern | Maybe | Tags | Literals

BLANK = re.compile(r" (?![A-Za-z])|\n")
BETWEEN_TAGS = re.compile(r"(?<=>) (?=<)")  # where the opening of Tags may have white space

NAME, JSON = Slot.NAME, Slot.JSON
PYTHON = Literals('"', "=", ":", True, ("True", "False", "None"), ")")
GEMMA = Literals('<|"|>', ":", ":", False, ("true", "false", "null"), "}")
FUNCTION_GEMMA = Literals("<escape>", ":", ":", False, ("true", "false", "null"), "}")

_OBJECT = ('{ "name" : "', NAME, '" , "arguments" : ', JSON, " }")
_PARAMETERS = ('{ "name" : "', NAME, '" , "parameters" : ', JSON, " }")
_TAG = Tags("<parameter={key}>", "</parameter>")
_FUNCTION_TAGS = ("<function=", NAME, "> ", _TAG, " </function>")
_M3 = "]<]minimax[>["
_BARE_STARTS = tuple(f"{{{blank}{kind}" for blank in ("", " ", "\n  ", "\n    ") for kind in ('"name": "', '"name":"'))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written.

    openings: texts that open a section of calls; the first is the usual one. closing: the text that closes it; "" if
    the answer ends with it. call: the pieces of one call. separator: between the calls of a section; None if a section
    has one call. begin, end: around all calls of a section. signs: texts that must all occur in the template; None
    means the first opening and the closing. starts: whether the openings are part of the call, and occur only at the
    beginning of an answer's text, before a tool's name.
    """

    openings: tuple[str, ...]
    closing: str
    call: tuple[Piece, ...]
    separator: str | None = None
    begin: str = " "
    end: str = " "
    signs: tuple[str, ...] | None = None
    starts: bool = False

    def fits(self, shown: str) -> bool:
        """Whether a template shows this format."""
        signs = (self.openings[0], self.closing) if self.signs is None else self.signs
        return all(sign in shown for sign in signs)

    @property
    def arguments(self) -> Slot | Tags | Literals:
        """How the arguments are written."""
        return next(piece for piece in self.call if piece is Slot.JSON or isinstance(piece, Tags | Literals))


def _row(opening: str, closing: str, *call: Piece, **more: object) -> CallFormat:
    return CallFormat((opening,), closing, call, **more)  # type: ignore[arg-type]


def _list(opening: str, closing: str, *call: Piece, **more: object) -> CallFormat:
    return _row(opening, closing, *call, separator=" , ", begin=" [ ", end=" ] ", **more)


def _invoked(section: str, prefix: str, parameter: str) -> CallFormat:
    """XML. prefix: of the names of inner tags."""
    return _row(
        f"<{section}>",
        f"</{section}>",
        *(f'<{prefix}invoke name="', NAME, '"> '),
        Tags(f"<{prefix}parameter {parameter}>", f"</{prefix}parameter>"),
        f" </{prefix}invoke>",
        separator=" ",
    )


HARMONY = _row(
    "to=functions.",
    "<|call|>",
    NAME,
    Maybe(("<|channel|>commentary",)),
    " ",
    Maybe(("<|constrain|>",)),
    Maybe(("json",)),
    "<|message|>",
    JSON,
    signs=("<|channel|>", "to=functions."),
)

# The whole answer is one call, for templates that show no format.
BARE = CallFormat(
    _BARE_STARTS, "", ('{ "name" : "', NAME, '" , "', Pattern("arguments|parameters"), '" : ', JSON, " }"), starts=True
)

# Calls of any template's model that are not written as the template shows: JSON objects in a code fence, between other
# tags, or bare at the beginning of a line. `reader` reads them.
LOOSE = CallFormat((), "", (JSON,), starts=True)

FORMATS: tuple[CallFormat, ...] = (
    HARMONY,
    # DeepSeek R1 and V3, then V3.1, then V3.2 and V4
    _row(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", NAME, " ```json ", JSON, " ```<｜tool▁call▁end｜>"),
        separator=" ",
        signs=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    _row(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        *("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜> ", JSON, " <｜tool▁call▁end｜>"),
        separator=" ",
    ),
    _invoked("｜DSML｜function_calls", "｜DSML｜", 'name="{key}" string="{string}"'),
    _invoked("｜DSML｜tool_calls", "｜DSML｜", 'name="{key}" string="{string}"'),
    _invoked("atem:function_calls", "atem:", 'name="{key}"'),
    # Kimi K2 and K3
    _row(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        *("<|tool_call_begin|>functions.", NAME, ":", Pattern("[0-9]{1,3}")),
        *("<|tool_call_argument_begin|> ", JSON, " <|tool_call_end|>"),
        separator=" ",
    ),
    _row(
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        *('<|open|>call tool="', NAME, '" index="', Pattern("[0-9]{1,3}"), '"<|sep|>'),
        Tags('<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
        "<|close|>call<|sep|>",
        separator="",
    ),
    # LFM2 and 2.5
    _list("<|tool_call_start|>", "<|tool_call_end|>", NAME, "( ", PYTHON, " )"),
    _list("<|tool_call_start|>", "<|tool_call_end|>", NAME, "( ", PYTHON, " )", signs=("List of tools: ",)),
    # Olmo 3
    _row("<function_calls>", "</function_calls>", NAME, "( ", PYTHON, " )", separator="\n"),
    # Gemma 4, and FunctionGemma
    _row("<|tool_call>", "<tool_call|>", "call:", NAME, "{", GEMMA, "}", begin="", end=""),
    _row("<start_function_call>", "<end_function_call>", "call:", NAME, "{", FUNCTION_GEMMA, "}", begin="", end=""),
    # Solar Open
    _row(
        "<|tool_call:begin|>",
        "<|tool_call:end|>",
        *(Pattern("[A-Za-z0-9_-]{1,32}"), "<|tool_call:name|>", NAME, "<|tool_call:args|>", JSON),
    ),
    # Command R7B and A, and R+
    _list(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        *('{ "tool_call_id" : "', Pattern("[0-9]{1,3}"), '" , "tool_name" : "', NAME, '" , "parameters" : ', JSON),
        " }",
    ),
    CallFormat(
        ("Action:",),
        "",
        ('{ "tool_name" : "', NAME, '" , "parameters" : ', JSON, " }"),
        separator=" , ",
        begin=" ```json [ ",
        end=" ] ```",
        signs=("Action:", '"tool_name"'),
    ),
    # Apertus
    _list("<|tools_prefix|>", "<|tools_suffix|>", '{ "', NAME, '" : ', JSON, " }"),
    # MiniMax M2 and M3
    _invoked("minimax:tool_call", "", 'name="{key}"'),
    _row(
        f"{_M3}<tool_call>",
        f"{_M3}</tool_call>",
        *(f'{_M3}<invoke name="', NAME, '">'),
        Tags(f"{_M3}<{{key}}>", f"{_M3}</{{key}}>"),
        f"{_M3}</invoke>",
        separator=" ",
        signs=(_M3, "<tool_call>"),
    ),
    # Seed-OSS, Nemotron
    _row("<seed:tool_call>", "</seed:tool_call>", *_FUNCTION_TAGS),
    _list("<TOOLCALL>", "</TOOLCALL>", *_OBJECT),
    # Hunyuan
    _row(
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        *("<tool_call:opensource>", NAME, "<tool_sep:opensource> "),
        Tags(
            "<arg_key:opensource>{key}</arg_key:opensource> <arg_value:opensource>",
            "</arg_value:opensource>",
        ),
        " </tool_call:opensource>",
        separator=" ",
    ),
    # GigaChat
    _row("function call<|role_sep|>", "<|message_sep|>", *_OBJECT),
    _row("<|function_call|>", "", *_OBJECT),
    # Apriel, MiniMax M1
    _list("<tool_calls>", "</tool_calls>", *_OBJECT, signs=("<tool_calls>[",)),
    _row("<tool_calls>", "</tool_calls>", *_OBJECT, separator="\n"),
    # GLM 4.5 and later, Qwen 3 Coder and Qwen 3.5, Qwen, Hermes and similar models
    _row(
        "<tool_call>",
        "</tool_call>",
        *(NAME, " "),
        Tags("<arg_key>{key}</arg_key> <arg_value>", "</arg_value>"),
        signs=("<tool_call>", "<arg_key>"),
    ),
    _row("<tool_call>", "</tool_call>", *_FUNCTION_TAGS, signs=("<tool_call>", "<function=", "<parameter=")),
    _row("<tool_call>", "</tool_call>", *_OBJECT),
    # Mistral: small 3.2, later ones, Nemo
    _row(
        "[TOOL_CALLS]",
        "",
        *(NAME, "[CALL_ID]", Pattern("[A-Za-z0-9]{9}"), "[ARGS] ", JSON),
        separator="[TOOL_CALLS]",
        signs=("[TOOL_CALLS]", "[CALL_ID]"),
    ),
    _row("[TOOL_CALLS]", "", NAME, "[ARGS] ", JSON, separator="[TOOL_CALLS]", signs=("[TOOL_CALLS]", "[ARGS]")),
    _list(
        "[TOOL_CALLS]",
        "",
        *(
            '{ "name" : "',
            NAME,
            '" , "arguments" : ',
            JSON,
            Maybe((' , "id" : "', Pattern("[A-Za-z0-9]{9}"), '"')),
            " }",
        ),
    ),
    # Phi 4 mini, Granite 3, Firefunction
    _list("<|tool_call|>", "<|/tool_call|>", *_OBJECT, signs=("<|tool|>", "<|/tool|>")),
    _list("<|tool_call|>", "", *_OBJECT),
    _row(" functools[", "", *_OBJECT, separator=" , ", end=" ]"),
    # MiniCPM 5, Functionary 3.1
    _row('<function name="', "</function>", NAME, '"> ', Tags('<param name="{key}">', "</param>")),
    _row("<function=", "</function>", NAME, "> ", _TAG, " ", signs=("<function=", "<parameter=")),
    _row("<function=", "</function>", NAME, "> ", JSON),
    # Llama 3
    _row("<|python_tag|>", "<|eom_id|>", *_PARAMETERS, signs=("<|python_tag|>", '{"name": function name')),
    CallFormat(_BARE_STARTS, "", _PARAMETERS, starts=True, signs=('{"name": function name',)),
)


def call_formats(shown: str) -> tuple[CallFormat, ...]:
    """The formats that a template shows, the usual one first; BARE if it shows none.

    shown: the template's source and prompts that it has rendered. Of rows with the same opening, the first is used.
    """
    found: dict[str, CallFormat] = {}
    for row in FORMATS:
        if row.openings[0] not in found and row.fits(shown):
            found[row.openings[0]] = row
    if HARMONY.openings[0] in found:
        return (HARMONY,)
    return tuple(sorted(found.values(), key=lambda row: not row.starts)) or (BARE,)
