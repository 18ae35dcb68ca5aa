"""Samples tool calls of a weak model in every family's format, and counts those that parse and match the schema.

    python -m benchmarks.tool_calls [--calls 10000] [--with-model] [--temperature 1.2]

The weakest model has random logits over the built-in model's vocabulary, drawn anew for every token. With --with-model
the built-in model itself computes them, which takes ten times as long. Either is given the marker that opens a call;
from there it is constrained as in an answer that opens a call by itself.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from localllm.answer.call_constraints import NO_FORCING
from localllm.answer.splitting import answer_splitter
from localllm.answer.tool_calls import CallFormat, ToolCall
from localllm.answer.tool_calls.call import parameters_of
from localllm.answer.tool_calls.formats import BARE, FORMATS, HARMONY
from localllm.answer.tool_calls.grammar import CallGrammar
from localllm.engine.constraint import Constraint, ConstraintKind
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.placement.loaded_model import LoadedModel, load_model
from localllm.settings import Settings

BUILTIN = next((Path(__file__).parents[1] / "models" / "builtin").glob("*.gguf"))
AT_ONCE = 16
FORMS = [*FORMATS, BARE]
Written = tuple[str, bool]  # a text, and whether it was cut off at MAX_TOKENS
MAX_TOKENS = 600


def tool(name: str, required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's format."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool(
        "get_weather",
        ("city", "unit"),
        city={"type": "string", "maxLength": 20},
        days={"type": "integer", "minimum": 1, "maximum": 14},
        unit={"enum": ["C", "F"]},
        exact={"type": "boolean"},
    ),
    tool(
        "get_weather_at",
        ("place", "note"),
        place={
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": 0, "maximum": 1}, "y": {"enum": [1, 2, None]}},
            "required": ["x"],
            "additionalProperties": False,
        },
        tags={"type": "array", "items": {"enum": ["wind", "rain"]}, "maxItems": 3},
        note={"anyOf": [{"type": "string", "pattern": "^[a-z]{2,9}$"}, {"type": "null"}]},
    ),
    tool("now", ()),
]
SCHEMAS = parameters_of(TOOLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--with-model", action="store_true")
    parser.add_argument("--temperature", type=float, default=1.2)
    given = parser.parse_args()
    total: Counter[str] = Counter()
    begun = time.monotonic()
    with load_model(BUILTIN, Settings()) as loaded:
        for number, form in enumerate(FORMS):
            write = by_model if given.with_model else at_random
            found = sample(loaded, form, -(-given.calls // len(FORMS)), given.temperature, write)
            total += found
            line = f"{number + 1:3} {form.openings[0]!r:36} {str(form.call)[:60]:62} {dict(found)}"
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    complete = total["fit"] + total["misfit"]
    sys.stdout.write(
        f"{complete} calls in {time.monotonic() - begun:.0f} s: {total['fit']} fit ({total['fit'] / complete:.2%}); "
        f"{total['text']} answers were read as text; {total['cut']} were cut off at {MAX_TOKENS} tokens\n"
    )


def sample(
    loaded: LoadedModel, form: CallFormat, wanted: int, temperature: float, write: Callable[..., list[Written]]
) -> "Counter[str]":
    """Sample until `wanted` calls are complete; return the counts of outcomes."""
    grammar = CallGrammar(form, SCHEMAS, loaded.constraint_vocabulary()).section()
    constraint = loaded.constraint(ConstraintKind.LARK, NO_FORCING + grammar)
    reasoning = [("<|channel|>analysis<|message|>", "<|end|>")] if form is HARMONY else []
    found: Counter[str] = Counter()
    seed = 0
    while found["fit"] + found["misfit"] < wanted:
        for text, is_cut in write(loaded, form, constraint, temperature, range(seed, seed + AT_ONCE)):
            splitter = answer_splitter(reasoning, [form], SCHEMAS, starts_in_call=True)
            parts = [*splitter.push(text), *splitter.flush()]
            calls = [call for part in parts for call in part.tool_calls]
            found += Counter("fit" if fits(call) else "misfit" for call in calls)
            if is_cut:
                found["cut"] += 1
            elif not calls or any(part.unfinished for part in parts):
                found["text"] += 1
        seed += AT_ONCE
    return found


def by_model(
    loaded: LoadedModel, form: CallFormat, constraint: Constraint, temperature: float, seeds: Sequence[int]
) -> list[Written]:
    """The model's answers."""
    prompt = f"The tools are {json.dumps(TOOLS)}. {'' if form.starts else form.openings[0]}"
    tokens = tuple(loaded.tokenizer.encode(prompt))
    streams = []
    for seed in seeds:
        sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0, seed=seed)
        streams.append(
            loaded.engine.submit(GenerationRequest(tokens, sampling, max_tokens=MAX_TOKENS, constraint=constraint))
        )
    answers = [stream.collect() for stream in streams]
    return [(one.text, one.last.finish_reason is FinishReason.LENGTH) for one in answers]


def at_random(
    loaded: LoadedModel, form: CallFormat, constraint: Constraint, temperature: float, seeds: Sequence[int]
) -> list[Written]:
    """Answers of normally distributed logits with standard deviation 3, about that of a trained model."""
    tokenizer, found = loaded.tokenizer, []
    for seed in seeds:
        rng = np.random.default_rng([seed, FORMS.index(form)])
        state, text, count = constraint.fork(), b"", 0
        while not state.is_finished and count < MAX_TOKENS:
            allowed = np.flatnonzero(state.mask())
            logits = 3 * rng.normal(size=allowed.size) / temperature + rng.gumbel(size=allowed.size)
            token = int(allowed[logits.argmax()])
            state.accept(token)
            if token in tokenizer.eog_ids:
                break
            text += tokenizer.token_bytes(token)
            count += 1
        found.append((text.decode("utf-8", "replace"), count == MAX_TOKENS))
    return found


def fits(call: ToolCall) -> bool:
    """Whether a call's arguments fit its tool's schema."""
    return jsonschema.Draft202012Validator(SCHEMAS[call.name]).is_valid(call.arguments)


if __name__ == "__main__":
    main()
