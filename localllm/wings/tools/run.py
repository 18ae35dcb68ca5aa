"""localllm run --tools: the model calls tools that the command line allows, without asking the user."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.actions.action import MAX_ROUNDS, MalformedCallError, Toolbox, ToolError, failure
from localllm.actions.approvals import Approvals
from localllm.actions.folder import Folder
from localllm.answer.event import function_object
from localllm.answer.request import Message
from localllm.answer.tool_calls import ToolCall
from localllm.engine.request import FinishReason
from localllm.errors import RequestError
from localllm.front import printing
from localllm.front.answering import RunningAnswer
from localllm.front.terminal import StatusLine, note
from localllm.text import harmless, shortened
from localllm.wings.tools.builtin import FolderTools

OWNER = "localllm run"  # the owner of its changes in the journal


@dataclass(frozen=True, slots=True)
class RunTools:
    """The tools named by rules, and the rules; a call that no rule covers is rejected."""

    toolbox: Toolbox
    approvals: Approvals

    def result(self, call: ToolCall) -> tuple[str, str | None]:
        """Run a call if a rule covers it; returns the text for the model, and the tool to retry if it was malformed."""
        try:
            action = self.toolbox.plan(call)
            if not self.approvals.covers(action):
                raise ToolError(f"This call is not allowed. Allowed: {'; '.join(self.approvals.rules)}.")
            return action.result(threading.Event()), None
        except MalformedCallError as error:
            return failure(error), self.toolbox.must_call(call)
        except ToolError as error:
            return failure(error), None


@contextmanager
def opened_tools(rules: Sequence[str]) -> Iterator[RunTools]:
    """The tools named by rules, of the current folder and MCP servers. Raises RequestError for an unknown tool."""
    found = FolderTools(Folder(Path.cwd()), OWNER)
    names = {rule.partition(" ")[0] for rule in rules}
    try:
        if names - {tool.name for tool in found.tools}:
            found.start_servers()
        for problem in found.problems:
            note(problem)
        if unknown := names - {tool.name for tool in found.tools}:
            there = ", ".join(tool.name for tool in found.tools)
            raise RequestError(f"--tools: there is no tool {min(unknown)!r}. Available: {there}.")
        allowed = Toolbox([tool for tool in found.tools if tool.name in names])
        yield RunTools(allowed, Approvals(found.folder.root, given=rules))
    finally:
        found.close()


def answer_with_tools(started: RunningAnswer, tools: RunTools, status: StatusLine, silent: bool) -> printing.Printed:
    """Read an answer, run its calls and ask again, until there are no calls or MAX_ROUNDS are reached.

    Returns the last answer. Calls are logged to stderr.
    """
    request, stream = started.request, started.stream
    messages: list[Message] = list(request.messages)
    for left in reversed(range(MAX_ROUNDS + 1)):
        printed = printing.read(stream, status, silent, shows_calls=False)
        said = printed.answer
        if not said.calls or said.last.finish_reason is not FinishReason.STOP:
            return printed
        if not left:
            break
        calls = [*map(function_object, said.calls)]
        messages.append({"role": "assistant", "content": said.content, "thinking": said.reasoning, "tool_calls": calls})
        must_call = None
        for call in said.calls:
            text, malformed = tools.result(call)
            must_call = must_call or malformed
            note(harmless(f"{call.name} {shortened(str(call.arguments))}: {shortened(text)}"))
            messages.append({"role": "tool", "tool_name": call.name, "content": text})
        stream = started.model.prepare(replace(request, messages=messages, tool_choice=must_call)).submit()
    note(f"Stopped after {MAX_ROUNDS} rounds of tools.")
    return printed
