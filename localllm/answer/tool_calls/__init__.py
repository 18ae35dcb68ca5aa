"""Tool calls as models write them: one table of formats drives both the grammar and the reader."""

from localllm.answer.tool_calls.call import CallDelta, ToolCall
from localllm.answer.tool_calls.formats import CallFormat, call_formats
from localllm.answer.tool_calls.reader import CallReader

__all__ = ["CallDelta", "CallFormat", "CallReader", "ToolCall", "call_formats"]
