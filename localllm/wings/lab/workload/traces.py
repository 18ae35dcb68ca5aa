"""Traces of real services: when requests arrived, and the lengths of prompts and answers. They contain no text.

Azure's LLM inference traces (github.com/Azure/AzurePublicDataset) are CSV with the columns TIMESTAMP, ContextTokens and
GeneratedTokens. Mooncake's (github.com/kvcache-ai/Mooncake) are JSON lines: timestamp in milliseconds, input_length,
output_length, and hash_ids, one for each 512 tokens of the prompt; equal ids at the beginning are a shared prefix.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from localllm.errors import RequestError
from localllm.files import read_text
from localllm.wings.lab.workload.requests import Block, WorkloadRequest

MOONCAKE_BLOCK = 512
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path, most: int | None = None) -> list[WorkloadRequest]:
    """The first `most` requests of a trace in either format, the first of them due at once.

    Raises RequestError naming file and line.
    """
    requests: list[WorkloadRequest] = []
    lines = StringIO(read_text(path, pipes=True))
    head = lines.readline()
    lines.seek(0)
    for number, request in islice(_parsed(lines, head, path), most):
        if requests and request.at < requests[-1].at:
            raise RequestError(f"{path}, line {number}: the request is earlier than the one before it.")
        requests.append(request)
    if not requests:
        raise RequestError(f"{path} has no requests.")
    first = requests[0].at
    return [replace(request, at=request.at - first) for request in requests]


def _parsed(lines: Iterable[str], head: str, path: Path) -> Iterator[tuple[int, WorkloadRequest]]:
    if head.lstrip().startswith("{"):
        rows: Iterator[tuple[int, Any]] = enumerate(lines, 1)
        parse: Callable[[int, Any], WorkloadRequest] = _mooncake
    else:
        table = csv.DictReader(lines)
        if not set(_AZURE) <= set(table.fieldnames or ()):
            raise RequestError(
                f"{path} is not a trace: use CSV with the columns {', '.join(_AZURE)} (Azure's), or JSON lines with "
                "timestamp, input_length, output_length and hash_ids (Mooncake's)."
            )
        rows, parse = enumerate(table, 2), _azure
    for number, row in rows:
        try:
            yield number, parse(number, row)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise RequestError(f"{path}, line {number}: not a request of a trace ({error!r}).") from error


def _azure(number: int, row: dict[str, str]) -> WorkloadRequest:
    prompt, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    time = datetime.fromisoformat(row["TIMESTAMP"])
    at = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return _checked(WorkloadRequest(at, (Block(f"own {number}", prompt),), answer))


def _mooncake(_number: int, line: str) -> WorkloadRequest:
    row = json.loads(line)
    left, blocks = int(row["input_length"]), []
    for identity in row["hash_ids"]:
        blocks.append(Block(f"block {identity}", min(left, MOONCAKE_BLOCK)))
        left -= blocks[-1].tokens
    if left > 0:
        raise ValueError(f"hash_ids end {left} tokens before the prompt does")
    return _checked(WorkloadRequest(float(row["timestamp"]) / 1000, tuple(blocks), int(row["output_length"])))


def _checked(request: WorkloadRequest) -> WorkloadRequest:
    if min((block.tokens for block in request.blocks), default=0) < 1 or request.answer_tokens < 0:
        raise ValueError("lengths below 1")
    return request


def scaled(requests: Sequence[WorkloadRequest], shorter: float = 1.0, faster: float = 1.0) -> list[WorkloadRequest]:
    """The same trace with lengths divided by `shorter` (to one token at least), and times by `faster`."""
    return [
        WorkloadRequest(
            request.at / faster,
            tuple(Block(block.identity, max(1, round(block.tokens / shorter))) for block in request.blocks),
            max(1, round(request.answer_tokens / shorter)),
        )
        for request in requests
    ]
