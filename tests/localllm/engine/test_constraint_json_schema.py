"""The official JSON Schema Test Suite: generated text validates against its schema, or the schema is refused."""

import contextlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from constraint_walk import Walker

from gguf_io import load_tokenizer, open_model
from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.constraint.json_schema import KEPT, NEUTRAL, NOT_ENFORCED, enforceable
from localllm.errors import RequestError
from tests.fakes.byte_vocabulary import ByteVocabulary

jsonschema = pytest.importorskip("jsonschema", reason="the validator that serves as oracle is not installed")

DIALECTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
# Most schemas of older drafts are also in the newest draft's suite.
WALKS = {"draft7": 1, "draft2019-09": 1, "draft2020-12": 2}


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


@pytest.mark.slow
@pytest.mark.parametrize("draft", DIALECTS)
def test_everything_generated_validates(data_dir: Path, draft: str) -> None:
    with open_model(data_dir / "vocab" / "ggml-vocab-gpt-2.gguf") as file:
        tokenizer = load_tokenizer(file)
    vocabulary, walker = ConstraintVocabulary(tokenizer), Walker(tokenizer)
    accepted = finished = 0
    for name, schema in suite_schemas(data_dir, draft):
        if beyond_the_oracle(schema):
            continue
        try:
            constraint = compile_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), vocabulary)
        except RequestError as refusal:
            assert len(str(refusal)) > 20, name
            continue
        accepted += 1
        in_full = not enforceable(json.dumps(schema))[1] and "oneOf" not in json.dumps(schema)
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        for seed in range(WALKS[draft]):
            text = walker.text(constraint.fork(), seed)
            if text is not None:
                finished += 1
                parsed = json.loads(text)
                if not in_full:
                    continue
                errors = list(validator(schema, format_checker=validator.FORMAT_CHECKER).iter_errors(parsed))
                assert not errors, f"{name}: {text[:200]} under {schema}: {errors}"
    assert accepted > 150
    assert finished > 0.8 * WALKS[draft] * accepted


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
