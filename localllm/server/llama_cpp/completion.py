"""llama-server's /completion and /infill: a text to continue, or a gap to fill."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from localllm.answer.event import Answer, AnswerEvent
from localllm.answer.request import UNLIMITED, AnswerRequest
from localllm.engine.request import FinishReason, SamplingParams
from localllm.server.answering import Writer, answer
from localllm.server.bodies import BANNED, Body, Limit, Object, Sampled, Tokens
from localllm.server.errors import ApiError
from localllm.server.limits import MAX_CHOICES, MAX_INT, MAX_LOGIT_BIAS, MAX_PROMPTS, MAX_TOP_LOGPROBS
from localllm.server.llama_cpp.routes import LlamaCppRoute
from localllm.server.service import RunningAnswers, Service, ServiceDep
from localllm.server.streams import interruptible
from localllm.server.wire import TimedProgress, logprob_entries, notes_of, sse, timings

router = APIRouter(route_class=LlamaCppRoute, tags=["llama.cpp"])

_DEFAULTS = SamplingParams()
_ABSENT = object()


# Parameters that disable each of llama.cpp's samplers, in the order in which they are applied.
_NEUTRAL: dict[str, Object] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
}
# llama.cpp's sampler for gaps in code, which its plugins for editors name. It leaves one or two tokens; here it takes
# the likeliest.
_INFILL = "infill"


class Predicted(Sampled):
    """Fields of both routes. n_predict: the most tokens; -1: as many as fit.

    cache_prompt has no effect: prefixes are always reused. samplers: those to apply, in the usual order; the others
    are disabled. n_indent: a line with less indentation ends the answer. t_max_predict_ms: after this time from the
    first token, a line break does; 0 and less: never. return_tokens: tell the ids of the answer's tokens.
    response_fields: what of the response is sent, inner fields named by their paths, as "generation_settings/seed".
    """

    n_predict: Limit = UNLIMITED
    cache_prompt: bool = True
    ignore_eos: bool = False
    bias_pairs: Annotated[list[Any], Field(fail_fast=True, max_length=MAX_LOGIT_BIAS)] | None = None
    samplers: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    n_indent: Annotated[int, Field(le=MAX_INT)] = 0
    t_max_predict_ms: Annotated[int, Field(le=MAX_INT)] = 0
    return_tokens: bool = False
    response_fields: Annotated[list[str], Field(fail_fast=True, max_length=256)] | None = None
    post_sampling_probs: bool = False
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    @model_validator(mode="before")
    @classmethod
    def _pairs_apart(cls, given: Any) -> Any:
        biases = given.get("logit_bias") if isinstance(given, dict) else None
        if isinstance(biases, dict) and not all(str(token).isdecimal() for token in biases):  # texts
            biases = [[int(token) if token.isdecimal() else token, bias] for token, bias in biases.items()]
        return {**given, "logit_bias": None, "bias_pairs": biases} if isinstance(biases, list) else given

    def answer_fields(self) -> Object:
        """The fields of an AnswerRequest. Raises ApiError 400."""
        fields = self.request_fields(self.stop, self.n_probs or None)
        fields["sampling"] |= self._without_effect()
        if self.post_sampling_probs:
            fields["sampling"]["post_sampling_probs"] = True
        return fields | {
            "defaults": _DEFAULTS,
            "max_tokens": self.most,
            "ignore_eos": self.ignore_eos,
            "least_indent": max(self.n_indent, 0),
            "line_limit_s": self.t_max_predict_ms / 1000 if self.t_max_predict_ms > 0 else None,
        }

    @property
    def most(self) -> int:
        """The most tokens of an answer; -1: as many as fit."""
        return self.n_predict if self.max_tokens is None else self.max_tokens

    def _without_effect(self) -> Object:
        """Parameters that disable the samplers left out. Raises ApiError 400 for an unknown one or another order."""
        if self.samplers is None:
            return {}
        wanted = ["typ_p" if name == "typical_p" else name for name in self.samplers if name != _INFILL]
        if wanted != [name for name in _NEUTRAL if name in wanted]:
            raise ApiError(400, f"samplers must be some of {', '.join(_NEUTRAL)}, in this order")
        without = {key: value for name in _NEUTRAL if name not in wanted for key, value in _NEUTRAL[name].items()}
        return without | ({"temperature": 0.0} if _INFILL in self.samplers else {})


class LlamaCompletionBody(Predicted):
    """/completion. prompt: text, token ids, or both mixed; several prompts in a list are answered one after the other.

    A prompt may be an object with prompt_string. n_cmpl: answers to each prompt. grammar (GBNF) or json_schema hold the
    answer.
    """

    prompt: (
        str
        | Tokens
        | Object
        | Annotated[
            list[str | int | Object | Annotated[list[str | int], Field(fail_fast=True)]],
            Field(fail_fast=True, max_length=MAX_PROMPTS),
        ]
    ) = ""
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_schema: Object | None = None


class Extra(Body):
    """A text from elsewhere in a repository."""

    filename: str = ""
    text: str


class InfillBody(Predicted):
    """/infill. input_extra: texts from other files, the most relevant last. prompt: text after the prefix."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[Extra], Field(fail_fast=True, max_length=MAX_PROMPTS)] | None = None
    prompt: str = ""


@router.post("/completion")
@router.post("/completions")
async def completion(body: LlamaCompletionBody, http: Request, service: ServiceDep) -> Response:
    """Continue one or several prompts."""
    if body.grammar and body.json_schema is not None:
        raise ApiError(400, "grammar and json_schema exclude each other; send one of them")
    held: Object = {"grammar": ("gbnf", body.grammar)} if body.grammar else {"format": body.json_schema}
    prompts = await _tokenized(body, _prompts(body.prompt), service)
    fields = body.answer_fields() | held
    requests = [AnswerRequest(prompt=prompt, **fields) for prompt in prompts]
    choices = body.n_cmpl or body.n or 1
    writer = _Writer(body, len(requests) * choices > 1)
    return await answer(http, service, body, requests, writer, choices)


@router.post("/infill")
async def infill(body: InfillBody, http: Request, service: ServiceDep) -> Response:
    """Fill in the text between a prefix and a suffix."""
    (prompt,) = await _tokenized(body, [f"{body.input_prefix}{body.prompt}"], service)
    extra = [(one.filename, one.text) for one in body.input_extra or ()]
    request = AnswerRequest(prompt=prompt, suffix=body.input_suffix, extra=extra, **body.answer_fields())
    return await answer(http, service, body, [request], _Writer(body))


async def _tokenized(body: Predicted, prompts: list[Any], service: Service) -> list[Any]:
    """The prompts, those that mix text and ids as ids. Also sets the body's model, and its logit_bias from pairs."""
    body.model = await service.model_or_only(body.model)
    if not body.bias_pairs and all(isinstance(prompt, str) for prompt in prompts):
        return prompts
    async with service.lease(body.model) as lease:
        tokenizer = lease.model.tokenizer
        if body.bias_pairs:
            body.logit_bias = await interruptible(partial(_biases, body.bias_pairs, tokenizer))
        return [await interruptible(partial(_encoded, prompt, tokenizer)) for prompt in prompts]


def _prompts(given: Any) -> list[Any]:
    """The prompts of a body. Text mixed with ids is one prompt; a list of texts or of lists is several."""
    if isinstance(given, str | dict) or (given and any(isinstance(one, int) for one in given)):
        return [_text_of(given)]
    if not given:
        raise ApiError(400, "prompt is empty")
    return [_text_of(one) for one in given]


def _text_of(prompt: Any) -> Any:
    """A prompt, or the text of a prompt object. Raises ApiError 400."""
    if not isinstance(prompt, dict):
        return prompt
    text = prompt.get("prompt_string")
    if not isinstance(text, str) or prompt.get("multimodal_data"):
        raise ApiError(400, "a prompt that is an object must have prompt_string; send images to /v1/chat/completions")
    return text


def _biases(pairs: Sequence[Any], tokenizer: Any) -> dict[str, float]:
    """Biases by token id. A text means each of its tokens; false bans them. Raises ApiError 400."""
    found: dict[str, float] = {}
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | str)
        if not is_pair or not isinstance(pair[1], int | float) or pair[1] is True:
            raise ApiError(400, "logit_bias must be a list of pairs: a token id or a text, and a number or false")
        token, bias = pair
        tokens = tokenizer.encode(token, add_special=False) if isinstance(token, str) else [token]
        found |= {str(one): BANNED if bias is False else bias for one in tokens}
    return found


def _encoded(prompt: Any, tokenizer: Any) -> Any:
    """A prompt that mixes text and token ids, as ids. A prompt of text alone stays text."""
    if isinstance(prompt, str):
        return prompt
    found: list[int] = []
    for at, one in enumerate(prompt):
        found += [one] if isinstance(one, int) else tokenizer.encode(one, add_special=at == 0, parse_special=True)
    return found


class _Writer(Writer):
    route = LlamaCppRoute

    def __init__(self, body: Predicted, several: bool = False) -> None:
        self._timed = TimedProgress(body.return_progress)
        self._body = body
        self._several = several

    def progress(self, progress: Object) -> bytes:
        return sse({"content": "", "stop": False, "progress": progress, **self._timed.fields(progress)})

    def event(self, _run: RunningAnswers, index: int, event: AnswerEvent) -> Iterator[bytes]:
        if event.content or event.logprobs:
            counts = event.counts
            yield sse(
                {
                    "index": index,
                    "content": event.content,
                    "tokens": list(event.token_ids),
                    "stop": False,
                    "id_slot": -1,
                    "tokens_predicted": counts.generated,
                    "tokens_evaluated": counts.prompt,
                    **({"timings": timings(event)} if self._body.timings_per_token else {}),
                    **_probabilities(event, self._body.post_sampling_probs),
                }
            )

    def end(self, run: RunningAnswers) -> Iterator[bytes]:
        for index in range(len(run.answers)):
            yield sse(self._selected({**self._one(run, index), "content": "", "tokens": []}))

    def whole(self, run: RunningAnswers) -> Any:
        found = [
            self._selected(self._one(run, index) | _probabilities(answer, self._body.post_sampling_probs))
            for index, answer in enumerate(run.answers)
        ]
        return found if self._several else found[0]

    def _selected(self, told: Object) -> Object:
        """The fields named by response_fields, by their paths; all fields if it names none."""
        found: Object = {}
        for path in self._body.response_fields or ():
            value: Any = told
            for name in path.split("/"):
                value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
            if value is not _ABSENT:
                found[path] = value
        return found if self._body.response_fields else told

    def _one(self, run: RunningAnswers, index: int) -> Object:
        answer, body = run.answers[index], self._body
        last, counts = answer.last, answer.last.counts
        settings = {
            "n_predict": body.n_predict,
            "seed": last.seed,
            "stop": body.stop or [],
            "stream": bool(body.stream),
        }
        return {
            "index": index,
            "content": answer.content,
            "tokens": answer.token_ids if body.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": body.model,
            "tokens_predicted": counts.generated,
            "tokens_evaluated": counts.prompt,
            "tokens_cached": counts.prompt + counts.generated,
            "generation_settings": settings,
            "prompt": _prompt_text(run, index),
            "has_new_line": "\n" in answer.content,
            "truncated": bool(counts.dropped_tokens)
            or (last.finish_reason is FinishReason.LENGTH and counts.generated != body.most),
            **_ended(last),
            **notes_of(last),
            "timings": timings(last),
        }


def _probabilities(part: AnswerEvent | Answer, after_sampling: bool) -> Object:
    """Log-probabilities with token ids; of what the tokens were drawn from, probabilities."""
    entries = logprob_entries(part.logprobs)
    for entry, logprob in zip(entries, part.logprobs, strict=True):
        tokens = (entry, *entry["top_logprobs"])
        for one, token in zip(tokens, logprob.ids, strict=False):  # a remote server has none
            one["id"] = token
        if after_sampling:
            for one in tokens:
                one["prob"] = math.exp(one.pop("logprob"))
            entry["top_probs"] = entry.pop("top_logprobs")
    return {"completion_probabilities": entries} if entries else {}


def _prompt_text(run: RunningAnswers, index: int) -> str:
    """The prompt as text, with its special tokens. A remote server does not tell it."""
    tokens = run.prompt(index).tokens
    return "" if tokens is None else run.lease.model.tokenizer.decode(tokens)


def _ended(last: AnswerEvent) -> dict[str, str]:
    if last.stop_string:
        return {"stop_type": "word", "stopping_word": last.stop_string}
    return {"stop_type": "limit" if last.finish_reason is FinishReason.LENGTH else "eos", "stopping_word": ""}
