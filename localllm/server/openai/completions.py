"""/v1/completions."""

from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.answer.event import AnswerEvent, Logprob
from localllm.answer.request import AnswerRequest
from localllm.server.answering import answer
from localllm.server.bodies import Object
from localllm.server.errors import ApiError
from localllm.server.openai.schema import CompletionBody
from localllm.server.openai.wire import ChunkWriter, OpenAIRoute, constraint_of, finish_reason
from localllm.server.service import RunningAnswers, ServiceDep
from localllm.server.wire import finite, notes_of, sse

router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])


@router.post("/v1/completions")
async def completions(body: CompletionBody, http: Request, service: ServiceDep) -> Response:
    """Continue one or several prompts."""
    body.model = await service.model_or_only(body.model)
    requests = await to_thread.run_sync(completion_requests, body)
    return await answer(http, service, body, requests, _Writer(body), body.n or 1)


def completion_requests(body: CompletionBody) -> list[AnswerRequest]:
    """A request for each prompt of a body. Raises ApiError 400."""
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of is not supported; leave it out or set it to n")
    prompt: Any = body.prompt
    if body.suffix and not isinstance(prompt, str):
        raise ApiError(400, "suffix requires a single prompt of text")
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    if several and not prompt:
        raise ApiError(400, "prompt is empty")
    fields = body.request_fields(body.stop, body.logprobs) | {"max_tokens": body.max_tokens} | constraint_of(body)
    prompts = prompt if several else [prompt]
    wanted = [count for count in (body.logprobs if body.echo else None, body.prompt_logprobs) if count is not None]
    of_prompt = max(wanted, default=None)
    return [
        AnswerRequest(prompt=one, suffix=body.suffix or None, prompt_logprobs=of_prompt, **fields) for one in prompts
    ]


class _Offsets:
    """Character offsets of one choice's tokens in its text. Pass the tokens in order."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def of(self, tokens: Iterable[bytes], *, complete: bool = False) -> list[int]:
        """The next tokens' offsets. complete: the tokens after these do not continue their last character."""
        found = []
        for token in tokens:
            found.append(self._at)
            self._at += len(self._decoder.decode(token))
        if complete:
            self._at += len(self._decoder.decode(b"", final=True))
        return found


class _Writer(ChunkWriter):
    def __init__(self, body: CompletionBody) -> None:
        super().__init__(body, "cmpl", "text_completion")
        self._echo = bool(body.echo)
        self._scores_echo = self._echo and body.logprobs is not None
        self._top = body.logprobs or 0
        self._prompt_top = body.prompt_logprobs
        self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)

    def begin(self, run: RunningAnswers) -> Iterator[bytes]:
        if self._echo and not self._scores_echo:
            for index in range(len(run.streams)):
                yield self._chunk(index, _prompt_text(run, index))

    def _content(self, index: int, text: str) -> bytes:
        return self._chunk(index, text)

    def _chunks(self, run: RunningAnswers, index: int, event: AnswerEvent) -> Iterator[bytes]:
        if (scores := event.prompt_logprobs) is not None:
            text = _prompt_text(run, index) if self._scores_echo else ""
            logprobs = self._echoed(run, index, scores) if self._scores_echo else None
            yield self._chunk(index, text, logprobs=logprobs, **self._of_prompt(scores))
        if event.parts or event.logprobs:
            logprobs = self._logprobs(index, event.logprobs)
            yield self._chunk(index, event.content, self._timings(event), logprobs=logprobs)
        if event.finish_reason is not None:
            reason, timed = finish_reason(run.answers[index]), self._timings(event, is_last=True)
            yield self._chunk(index, "", timed, finish_reason=reason, **notes_of(event))

    def whole(self, run: RunningAnswers) -> Object:
        choices = []
        for index, found in enumerate(run.answers):
            scores = found.prompt_logprobs or ()
            before = self._echoed(run, index, scores) if self._scores_echo else None
            after = self._logprobs(index, found.logprobs)
            both = before and after and {name: before[name] + after[name] for name in before}
            choices.append(
                _choice(
                    index,
                    (_prompt_text(run, index) if self._echo else "") + found.content,
                    logprobs=both or before or after,
                    finish_reason=finish_reason(found),
                    **self._of_prompt(scores),
                    **notes_of(found.last),
                )
            )
        return {**self._head, "choices": choices, **self._totals(run)}

    def _chunk(self, index: int, text: str, timed: Object | None = None, **more: object) -> bytes:
        return sse({**self._head, "choices": [_choice(index, text, **more)], **(timed or {})})

    def _echoed(self, run: RunningAnswers, index: int, scores: Sequence[Logprob]) -> Object:
        """The prompt's log-probabilities in OpenAI's format; its first token has none."""
        tokens, tokenizer = _prompt_tokens(run, index), run.lease.model.tokenizer
        pieces = (tokenizer.token_bytes(token, skip_special=True) for token in tokens)
        first, *offsets = self._offsets[index].of(pieces, complete=True)
        following = _logprobs(scores, self._top, offsets)
        return {
            "tokens": [tokenizer.decode(tokens[:1]), *following["tokens"]],
            "token_logprobs": [None, *following["token_logprobs"]],
            "top_logprobs": [None, *following["top_logprobs"]],
            "text_offset": [first, *following["text_offset"]],
        }

    def _logprobs(self, index: int, entries: Sequence[Logprob]) -> Object | None:
        offsets = self._offsets[index].of(entry.token for entry in entries)
        return _logprobs(entries, self._top, offsets) if entries else None

    def _of_prompt(self, scores: Sequence[Logprob]) -> Object:
        """The prompt's log-probabilities in vLLM's format, if the body has prompt_logprobs."""
        if self._prompt_top is None:
            return {}
        return {"prompt_logprobs": [None, *(_by_id(entry, self._prompt_top) for entry in scores)]}


def _prompt_tokens(run: RunningAnswers, index: int) -> Sequence[int]:
    tokens = run.prompt(index).tokens
    if tokens is None:
        raise ApiError(400, "echo is not supported for models of a remote server")
    return tokens


def _prompt_text(run: RunningAnswers, index: int) -> str:
    text: str = run.lease.model.tokenizer.decode(_prompt_tokens(run, index), skip_special=True)
    return text


def _choice(index: int, text: str, **more: object) -> Object:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": None, **more}


def _logprobs(entries: Sequence[Logprob], top: int, offsets: Sequence[int]) -> Object:
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [_by_text(entry, top) for entry in entries],
        "text_offset": list(offsets),
    }


def _by_text(entry: Logprob, top: int) -> Object:
    """The likeliest tokens and the token itself, by text; of several with the same text, the likeliest."""
    found: Object = {}
    for token, value in (*entry.top[:top], (entry.token, entry.logprob)):
        found.setdefault(token.decode("utf-8", "replace"), finite(value))
    return found


def _by_id(entry: Logprob, top: int) -> Object:
    """The likeliest tokens and the token itself, by id. Its rank is known only if it is among the likeliest."""
    own, *others = entry.ids
    ranked = zip(others[:top], entry.top, count(1))
    named = [*((each, *scored, rank) for each, scored, rank in ranked), (own, entry.token, entry.logprob, None)]
    found: Object = {}
    for each, token, value, rank in named:
        spelt = {"logprob": finite(value), "rank": rank, "decoded_token": token.decode("utf-8", "replace")}
        found.setdefault(str(each), spelt)
    return found
