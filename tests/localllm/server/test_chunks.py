"""The bytes of responses are those of h11, whose checks a streamed body's chunks do without."""

import h11
import pytest

from localllm.server.serve import Connection
from localllm.server.wire import Framed, sse

EVENTS = [h11.Data(data=data) for data in (b"data: a\n\n", b"", b"b" * 70_000)]


def sent(connection: h11.Connection, request: bytes, headers: list[tuple[str, str]]) -> bytes:
    """The bytes of two responses on a connection, whose bodies are streamed."""
    written = b""
    for _ in range(2):
        connection.receive_data(request)
        while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
            pass
        head = request.startswith(b"HEAD")
        response = h11.Response(status_code=200, headers=headers)
        for event in (response, *([] if head else EVENTS), h11.EndOfMessage()):
            written += connection.send(event) or b""
        if connection.our_state is not h11.DONE:
            break
        connection.start_next_cycle()
    return written


@pytest.mark.parametrize("headers", [[], [("Content-Length", "70009")]])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_a_streamed_response_has_the_bytes_of_h11(
    method: bytes, version: bytes, headers: list[tuple[str, str]]
) -> None:
    request = b"%b / HTTP/%b\r\nHost: a\r\n\r\n" % (method, version)
    own, other = (sent(kind(h11.SERVER), request, headers) for kind in (Connection, h11.Connection))
    assert own == other and own.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("text", ["a", "", '"\\\n', "\u2028\u00e9\U0001f600", "\ud800", "\0"])
def test_a_framed_line_is_that_of_the_whole_object(text: str) -> None:
    def line(content: str) -> bytes:
        return sse({"model": "\0 text", "choices": [{"text": content, "index": 0}]})

    assert Framed(line).line(text) == line(text)
