"""Which requests run first: protocol fields, and a header."""

from typing import Any

import pytest
from fastapi import Request

from localllm.answer.request import AnswerRequest
from localllm.server.errors import ApiError
from localllm.server.keys import NAMESPACE
from localllm.server.openai.chat import chat_request
from localllm.server.openai.schema import ChatBody
from localllm.server.service import for_user_of

HI: Any = [{"role": "user", "content": "Hi"}]


def test_requests_that_let_others_go_first() -> None:
    for tier, background in (("flex", True), ("auto", False), (None, False)):
        body = ChatBody(model="m", messages=HI, service_tier=tier)  # type: ignore[arg-type]
        assert chat_request(body).background == background
    assert chat_request(ChatBody(model="m", messages=HI, priority=5)).priority == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "background"), [("u=7", True), ("i, u=7;x", True), ("u=3, i", False), (None, False)]
)
def test_a_header_says_which_requests_let_others_go_first(header: str | None, background: bool) -> None:
    headers = [(b"priority", header.encode())] if header else []
    (request,) = for_user_of(Request({"type": "http", "headers": headers}), [AnswerRequest(prompt="hi", priority=-1)])
    assert (request.background, request.priority) == (background, -1)


def test_no_user_of_several_goes_before_the_others() -> None:
    http = Request({"type": "http", "headers": [], NAMESPACE: "0123"})
    assert for_user_of(http, [AnswerRequest(prompt="hi", priority=1)])[0].namespace == "0123"
    with pytest.raises(ApiError, match="several users"):
        for_user_of(http, [AnswerRequest(prompt="hi", priority=-1)])
