"""The texts by which models fence off reasoning and tool calls, as its template shows them.

Each row is (opening, closing). A closing of "" means that the call runs to the end of the turn.
"""

# ruff: noqa: RUF001 - DeepSeek's tokens are made of such characters

from collections.abc import Sequence

Marker = tuple[str, str]

REASONING: tuple[Marker, ...] = (
    ("<think>", "</think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|begin|>assistant<|think|>", "<|end|>"),
)

TOOL_CALLS: tuple[Marker, ...] = (
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<|tool_call>", "<tool_call|>"),
    ("<|tool_call:begin|>", "<|tool_call:end|>"),
    ("<|tool_calls:begin|>", "<|tool_calls:end|>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    ("<|tools_prefix|>", "<|tools_suffix|>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<TOOLCALL>", "</TOOLCALL>"),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ("<atem:function_calls>", "</atem:function_calls>"),
    ("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ("<|channel|>commentary", "<|call|>"),
    ("function call<|role_sep|>", "<|message_sep|>"),
    ("<tool_calls>", "</tool_calls>"),
    ("<tool_call>", "</tool_call>"),
    ("[TOOL_CALLS]", ""),
    ("<|python_tag|>", "<|eom_id|>"),
    ("<|tool_call|>", ""),
    ("<|function_call|>", ""),
    (" functools[", ""),
    ("<function name=", "</function>"),
    ("<function=", "</function>"),
)


def find_markers(text: str, known: Sequence[Marker]) -> tuple[Marker, ...]:
    """The known markers both of whose ends stand in the text, in the table's order: enclosing ones first."""
    return tuple((opening, closing) for opening, closing in known if opening in text and closing in text)
