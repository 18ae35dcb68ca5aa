"""What goes when a prompt, or the answer after it, outgrows the context. Nothing is ever cut silently."""

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.engine.request import ContextPolicy, GenerationRequest
from localllm.errors import ContextOverflowError

# First tokens that a rolling window keeps: models lean on them (Xiao et al., Efficient Streaming Language Models).
ATTENTION_SINKS = 4


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A prompt that leaves room for an answer, and what it cost."""

    tokens: Sequence[int]
    dropped_messages: int = 0
    dropped_tokens: int = 0


def fit_prompt(request: GenerationRequest, context: int) -> FittedPrompt:
    """Apply the request's policy to its prompt. context: tokens of prompt and answer together.

    Raises ContextOverflowError where the policy cannot make it fit.
    """
    room = 1 if request.max_tokens is None else min(request.max_tokens, 1)
    if len(request.prompt) + room <= context and request.context_policy is not ContextPolicy.DROP_MESSAGES:
        return FittedPrompt(request.prompt)
    if request.context_policy is ContextPolicy.DROP_MESSAGES:
        return _drop_messages(request, context)
    if request.context_policy is ContextPolicy.ROLLING:
        tokens = roll(request.prompt, context, kept_first(request))
        return FittedPrompt(tokens, dropped_tokens=len(request.prompt) - len(tokens))
    raise ContextOverflowError(len(request.prompt), context)


def kept_first(request: GenerationRequest) -> int:
    """How many first tokens of the prompt stay in its rolling window."""
    if request.keep is None:
        return ATTENTION_SINKS
    return len(request.prompt) if request.keep < 0 else min(request.keep, len(request.prompt))


def roll(tokens: Sequence[int], context: int, first: int = ATTENTION_SINKS) -> list[int]:
    """Keep the first and the newest tokens, half a context in all, so that the window is seldom computed again.

    first: how many, where they take less than half of the context. The newest take a quarter of it at least.
    """
    first = min(first, (context - 1) // 2)
    newest = max(context // 2 - first, context // 4, 1)
    return [*tokens[:first], *tokens[-newest:]]


def _drop_messages(request: GenerationRequest, context: int) -> FittedPrompt:
    """Drop the oldest messages in steps of a quarter of the context.

    The steps keep the cut in one place for many turns: the next turn drops the same messages again, and its prompt
    begins with what the cache holds. An answer is promised up to a quarter of the context.
    """
    quarter = max(context // 4, 1)
    answer = quarter if request.max_tokens is None else min(request.max_tokens, quarter)
    excess = len(request.prompt) + answer - context
    tokens, dropped = request.prompt, 0
    if excess > 0 and request.messages is not None:
        kept, dropped = request.messages.without_oldest(-(-excess // quarter) * quarter)
        tokens = (*kept, *request.prompt[request.messages.length :])
    if len(tokens) + min(answer, 1) > context:
        raise ContextOverflowError(len(tokens), context)
    return FittedPrompt(tokens, dropped, len(request.prompt) - len(tokens))
