"""One object per line: characters that end lines for some clients are escaped."""

import json

import ollama
import pytest

from localllm.server.wire import ndjson, sse
from tests.localllm.server.conftest import MODEL, Server

ENDS = "a\u2028b\u2029c\u0085d\r\ne\x0bf\x0cg\x1ch"


@pytest.mark.parametrize("text", [ENDS, ENDS + "\ud800", '"\\u2028\\\u2028"'])
def test_no_character_ends_a_line(text: str) -> None:
    line = ndjson({"text": text}).decode()
    assert line.splitlines() == [line[:-1]] and json.loads(line) == {"text": text}
    event = sse({"text": text}).decode()
    assert event.splitlines() == [event[:-2], ""] and json.loads(event.removeprefix("data: ")) == {"text": text}


def test_ollamas_client_reads_such_an_answer(server: Server) -> None:
    with ollama.Client(host=server.url) as client:
        parts = client.generate(MODEL, "Say it", format={"const": ENDS}, stream=True)
        assert json.loads("".join(part.response for part in parts)) == ENDS
