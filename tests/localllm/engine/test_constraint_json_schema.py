"""The official JSON Schema Test Suite: generated text validates against its schema, or the schema is refused."""

import contextlib
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from constraint_walk import Walker

from gguf_io import load_tokenizer, open_model
from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.constraint.json_schema import KEPT, NEUTRAL, NOT_ENFORCED, enforceable
from localllm.engine.constraint.trial import tried_grammar
from localllm.errors import RequestError
from tests.fakes.byte_vocabulary import ByteVocabulary

jsonschema = pytest.importorskip("jsonschema", reason="the validator that serves as oracle is not installed")

DIALECTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
WALKS = 2


def suite_schemas(data_dir: Path, draft: str) -> Iterator[tuple[str, Any]]:
    """Yield every schema of a draft with a name. Schemas state their dialect."""
    with tarfile.open(data_dir / "jsonschema" / "JSON-Schema-Test-Suite-tests.tar.gz") as archive:
        for member in archive:
            if not member.name.startswith(f"tests/{draft}/") or not member.name.endswith(".json"):
                continue
            content = archive.extractfile(member)
            assert content is not None
            for case in json.load(content):
                schema = case["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": DIALECTS[draft], **schema}
                yield f"{member.name}: {case['description']}", schema


def beyond_the_oracle(schema: Any) -> bool:
    """Whether a schema's patterns mean something else in Python's re than in ECMA 262."""
    text = json.dumps(schema)
    return r"\\p{" in text or r"\\W" in text


@pytest.fixture(scope="module")
def texts_under(data_dir: Path) -> Callable[[str], list[str]]:
    """Texts that a schema allows. Those of schemas with the same grammar, as most have in all drafts, are the same."""
    with open_model(data_dir / "vocab" / "ggml-vocab-gpt-2.gguf") as file:
        tokenizer = load_tokenizer(file)
    vocabulary, walker, known = ConstraintVocabulary(tokenizer), Walker(tokenizer), dict[str, list[str]]()

    def texts(schema: str) -> list[str]:
        grammar, _ = tried_grammar(ConstraintKind.JSON_SCHEMA, schema)
        if grammar not in known:
            constraint = compile_constraint(ConstraintKind.JSON_SCHEMA, schema, vocabulary)
            walked = (walker.text(constraint.fork(), seed) for seed in range(WALKS))
            known[grammar] = [text for text in walked if text is not None]
        return known[grammar]

    return texts


@pytest.mark.slow
@pytest.mark.parametrize("draft", DIALECTS)
def test_everything_generated_validates(data_dir: Path, draft: str, texts_under: Callable[[str], list[str]]) -> None:
    accepted = finished = 0
    for name, schema in suite_schemas(data_dir, draft):
        if beyond_the_oracle(schema):
            continue
        try:
            texts = texts_under(json.dumps(schema))
        except RequestError as refusal:
            assert len(str(refusal)) > 20, name
            continue
        accepted += 1
        in_full = not enforceable(json.dumps(schema))[1] and "oneOf" not in json.dumps(schema)
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        finished += len(texts)
        for text in texts:
            parsed = json.loads(text)
            if not in_full:
                continue
            errors = list(validator(schema, format_checker=validator.FORMAT_CHECKER).iter_errors(parsed))
            assert not errors, f"{name}: {text[:200]} under {schema}: {errors}"
    assert accepted > 150
    assert finished > 0.8 * WALKS * accepted


@pytest.mark.parametrize("keyword", sorted(KEPT | NEUTRAL | NOT_ENFORCED))
def test_a_value_of_the_wrong_type_is_enforced_or_refused(keyword: str) -> None:
    """A malformed schema raises RequestError, if anything."""
    vocabulary = ConstraintVocabulary(ByteVocabulary())
    around = ({}, {"properties": {"a": {}}, "minProperties": 1, "propertyNames": {"enum": ["a"]}})
    for value in (None, True, 5, -1, 1.5, "x", [], [1], [["a"]], {"a": 1}, [{}], {}):
        for base in around:
            schema = {**base, keyword: value}
            for whole in (schema, {"propertyNames": schema}, {"allOf": [schema]}):
                with contextlib.suppress(RequestError):
                    compile_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(whole), vocabulary)
