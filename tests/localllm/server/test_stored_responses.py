"""Stored responses, conversations, compaction, and what /v1/responses echoes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from localllm.server.errors import ApiError
from localllm.server.openai.stored import Stored
from tests.fakes.scripted_model import write_scripted_model
from tests.localllm.server.conftest import MODEL, Server, StartServer
from tests.waiting import PATIENCE_S

ANSWER = "<think>\nHm, what is it?\n</think>\n\nThe answer is forty-two, no less."


@pytest.fixture(scope="module")
def http(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_scripted_model(tmp_path_factory.mktemp("stored") / "scripted.gguf", {"plain": ANSWER})
    with (
        start_server("--model", str(path), models=()) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def gpt(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_is_read_listed_and_deleted(gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(model="scripted", input="Hi", metadata={"topic": "numbers"})
    second = gpt.responses.create(
        model="scripted", input=[{"role": "user", "content": "Why?"}], previous_response_id=first.id
    )
    again = gpt.responses.retrieve(second.id)
    assert again.to_dict() == second.to_dict() and gpt.responses.retrieve(first.id).metadata == {"topic": "numbers"}
    items: list[Any] = list(gpt.responses.input_items.list(second.id, order="asc", limit=1))  # page by page
    assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
    assert items[0].content[0].text == "Hi" and items[3].content[0].text == "Why?"
    newest = gpt.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in newest.data] == [items[3].id, items[2].id] and newest.has_more
    reference: Any = [{"type": "item_reference", "id": items[0].id}]
    assert gpt.responses.create(model="scripted", input=reference).output_text
    gpt.responses.delete(first.id)
    for call in (gpt.responses.retrieve, gpt.responses.delete, gpt.responses.input_items.list, gpt.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(first.id)  # type: ignore[operator]
    with pytest.raises(openai.BadRequestError, match="not stored here"):
        gpt.responses.create(model="scripted", input=reference)
    assert gpt.responses.retrieve(second.id)  # has its own copy of the conversation
    with pytest.raises(openai.BadRequestError, match="background"):
        gpt.responses.cancel(second.id)


def test_what_is_not_stored_is_not_found(gpt: openai.OpenAI, http: httpx.Client) -> None:
    unstored = gpt.responses.create(model="scripted", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(unstored.id)
    with pytest.raises(openai.BadRequestError) as raised:
        gpt.responses.create(model="scripted", input="Hi", previous_response_id=unstored.id)
    assert raised.value.code == "previous_response_not_found"
    refused = http.get(f"/v1/responses/{unstored.id}/input_items", params={"order": "up"})
    assert refused.status_code == 404
    kept = gpt.responses.create(model="scripted", input="Hi")
    for wrong in ({"order": "up"}, {"limit": 0}, {"after": "msg_none"}):
        assert http.get(f"/v1/responses/{kept.id}/input_items", params=wrong).status_code == 400


def test_answers_at_once_in_one_conversation_all_keep_their_items(gpt: openai.OpenAI) -> None:
    begun = gpt.conversations.create(items=[{"role": "user", "content": "Remember: blue."}])
    asked = [f"Question {number}" for number in range(4)]
    with ThreadPoolExecutor(len(asked)) as at_once:
        answers = list(
            at_once.map(
                lambda text: gpt.responses.create(
                    model="scripted", input=text, conversation=begun.id, max_output_tokens=99
                ),
                asked,
            )
        )
    items: list[Any] = list(gpt.conversations.items.list(begun.id, order="asc", limit=100))
    ids = [item.id for item in items]
    texts = [item.content[0].text if item.type == "message" else "" for item in items]
    assert len(items) == 1 + 3 * len(asked)
    for text, answer in zip(asked, answers, strict=True):
        at = texts.index(text)
        assert ids[at + 1 : at + 3] == [item.id for item in answer.output]  # each question is before its own answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_collects_the_items_of_its_responses(gpt: openai.OpenAI, stream: bool) -> None:
    begun = gpt.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "Remember: blue."}])
    asked: Any = {"model": "scripted", "input": "Hi", "conversation": begun.id}
    if stream:
        with gpt.responses.stream(**asked) as events:
            answer = events.get_final_response()
    else:
        answer = gpt.responses.create(**asked)
    assert answer.conversation and answer.conversation.id == begun.id
    items: list[Any] = list(gpt.conversations.items.list(begun.id, order="asc"))
    assert [item.type for item in items] == ["message", "message", "reasoning", "message"]
    longer = gpt.responses.create(model="scripted", input="More", conversation={"id": begun.id})
    assert longer.usage and answer.usage and longer.usage.input_tokens > answer.usage.input_tokens + 10
    (added,) = gpt.conversations.items.create(begun.id, items=[{"role": "user", "content": "Also red."}]).data
    assert added.id and gpt.conversations.items.retrieve(added.id, conversation_id=begun.id).id == added.id
    assert gpt.conversations.items.delete(added.id, conversation_id=begun.id).id == begun.id
    with pytest.raises(openai.NotFoundError):
        gpt.conversations.items.retrieve(added.id, conversation_id=begun.id)
    assert gpt.conversations.update(begun.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert gpt.conversations.retrieve(begun.id).metadata == {"c": "d"}
    assert gpt.conversations.delete(begun.id).deleted
    with pytest.raises(openai.NotFoundError):
        gpt.responses.create(**asked)


def test_a_conversation_and_a_previous_response_exclude_each_other(gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(model="scripted", input="Hi")
    with pytest.raises(openai.BadRequestError, match="exclude"):
        gpt.responses.create(model="scripted", input="x", previous_response_id=first.id, conversation="conv_1")
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve("conv_1")
    with pytest.raises(openai.BadRequestError, match="stored at OpenAI"):
        gpt.responses.create(model="scripted", prompt={"id": "pmpt_1"})


def test_a_compacted_conversation_continues(gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(model="scripted", input="How many?")
    compacted = gpt.responses.compact(model="scripted", previous_response_id=first.id)
    *kept, item = compacted.output
    assert [one.content[0].text for one in kept] == ["How many?"]  # type: ignore[union-attr]
    assert item.type == "compaction" and compacted.usage.output_tokens > 5
    going: Any = [*(one.to_dict(warnings=False) for one in compacted.output), {"role": "user", "content": "Go on."}]
    assert gpt.responses.create(model="scripted", input=going).output_text == "The answer is forty-two, no less."
    from localllm.server.openai.items import conversation_of

    messages = conversation_of(going)
    assert messages[1]["content"] == "Summary of the conversation so far:\nThe answer is forty-two, no less."
    foreign = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAA"}
    answer = gpt.responses.create(model="scripted", input=[foreign, {"role": "user", "content": "Hi"}])  # type: ignore[list-item]
    assert answer.warnings == ["Ignored: input item of type 'compaction'."]  # type: ignore[attr-defined]
    for nothing in ("", [foreign], [{"type": "web_search_call", "id": "ws_1"}]):
        with pytest.raises(openai.BadRequestError, match="nothing to compact"):
            gpt.responses.compact(model="scripted", input=nothing)  # type: ignore[arg-type]


def test_a_conversation_longer_than_the_context_is_compacted(server: Server) -> None:
    items = [{"role": "user", "content": "Once upon a time there was a girl. " * 8} for _ in range(30)]
    answer = httpx.post(f"{server.url}/v1/responses/compact", json={"model": MODEL, "input": items}, timeout=PATIENCE_S)
    assert answer.status_code == 200 and answer.json()["output"][-1]["type"] == "compaction"


@pytest.mark.parametrize(
    "wish", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}, {"include": [], "top_logprobs": 0}]
)
def test_log_probabilities_of_the_text(server: Server, wish: dict[str, Any]) -> None:
    top = wish.get("top_logprobs", 0)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as gpt:
        asked: Any = {"model": MODEL, "input": "Once upon a time", "temperature": 0, "max_output_tokens": 8, **wish}
        whole: Any = gpt.responses.create(**asked)
        deltas: list[Any] = []
        with gpt.responses.stream(**asked) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    deltas += event.logprobs
                elif event.type == "response.incomplete":
                    streamed: Any = event.response
    found = whole.output[0].content[0].logprobs
    assert len(found) == 8 and all(one.logprob <= 0 and len(one.top_logprobs) in (top, top + 1) for one in found)
    assert "".join(one.token for one in found).strip() == whole.output_text.strip()
    assert streamed.output[0].content[0].logprobs == found
    assert deltas and [one.token for one in deltas] == [one.token for one in found[: len(deltas)]]
    assert whole.top_logprobs == top


def test_what_is_stored_is_bounded_and_apart_for_each_user() -> None:
    stored = Stored(max_chars=4000)
    for number in range(40):
        items = [{"id": f"in_{number}", "role": "user", "content": "x" * 300}]
        output = [{"id": f"out_{number}", "type": "message", "content": []}]
        response = {"id": f"resp_{number}", "object": "response", "output": output}
        stored.keep("alice", response, items, 1, None)
    assert stored.response("alice", "resp_39").about["id"] == "resp_39"
    for user, identity in (("alice", "resp_0"), ("bob", "resp_39")):
        with pytest.raises(ApiError):
            stored.response(user, identity)
    with pytest.raises(ApiError):
        stored.expanded("alice", [{"id": "in_0"}], None)
    begun = stored.begin("alice", [{"role": "user", "content": "y" * 9000}], {})
    with pytest.raises(ApiError):
        stored.conversation("alice", begun["id"])


def test_an_items_id_may_be_that_of_a_response_or_conversation(gpt: openai.OpenAI, http: httpx.Client) -> None:
    """Clients choose the ids of items. Neither takes the other's place, also when the item is deleted."""
    kept = gpt.responses.create(model="scripted", input="Hi")
    begun = gpt.conversations.create()
    named: Any = [{"id": one, "role": "user", "content": "Me too."} for one in (kept.id, begun.id)]
    gpt.conversations.items.create(begun.id, items=named)
    assert gpt.responses.retrieve(kept.id).id == kept.id
    assert [item.id for item in gpt.conversations.items.list(begun.id, order="asc")] == [kept.id, begun.id]
    for one in (kept.id, begun.id):
        assert http.delete(f"/v1/conversations/{begun.id}/items/{one}").status_code == 200
    assert gpt.responses.retrieve(kept.id) and gpt.conversations.retrieve(begun.id)
    with pytest.raises(openai.BadRequestError, match="not stored here"):
        gpt.responses.create(model="scripted", input="Hi", previous_response_id=begun.id)
    gpt.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        gpt.conversations.delete(kept.id)


def test_references_and_ids_that_are_null(gpt: openai.OpenAI, http: httpx.Client) -> None:
    said: Any = [{"type": None, "id": None, "status": None, "role": "user", "content": "Who is it?"}]
    begun = gpt.conversations.create(items=said)
    (item,) = gpt.conversations.items.list(begun.id).data
    assert item.id and item.status == "completed" and item.content[0].text == "Who is it?"  # type: ignore[union-attr]
    other = gpt.conversations.create(items=[{"id": item.id, "type": None}])
    assert [one.id for one in gpt.conversations.items.list(other.id)] == [item.id]
    gpt.conversations.items.delete(item.id, conversation_id=other.id)
    for reference in ({"type": "item_reference"}, {"type": "item_reference", "id": None}):
        refused = http.post("/v1/responses", json={"model": "scripted", "input": [reference]})
        assert refused.status_code == 400 and "needs id as text" in refused.json()["error"]["message"]
    for metadata in ({"a": "x" * 513}, {"b" * 65: "x"}, {str(at): "x" for at in range(17)}):
        refused = http.post(f"/v1/conversations/{begun.id}", json={"metadata": metadata})
        assert refused.status_code == 400 and "metadata" in refused.json()["error"]["message"]


def test_removed_items_take_no_room() -> None:
    stored = Stored(max_chars=4000)
    begun = stored.begin("alice", [], {})["id"]
    for _ in range(20):
        (item,) = stored.add("alice", begun, [{"role": "user", "content": "z" * 900}])
        stored.remove_item("alice", begun, item["id"])
    assert stored.conversation("alice", begun).items == []


def test_pages_of_items(gpt: openai.OpenAI, http: httpx.Client) -> None:
    said: Any = [{"role": "user", "content": f"Line {number}."} for number in range(7)]
    begun = gpt.conversations.create(items=said)
    path = f"/v1/conversations/{begun.id}/items"
    for order, wanted in (("asc", list(range(7))), ("desc", list(range(6, -1, -1)))):
        found: list[Any] = []
        pages = 0
        for page in gpt.conversations.items.list(begun.id, order=order, limit=3).iter_pages():  # type: ignore[arg-type]
            found += page.data
            pages += 1
        assert [item.content[0].text for item in found] == [f"Line {number}." for number in wanted] and pages == 3
    whole = http.get(path, params={"limit": 100}).json()
    assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (False, found[0].id, found[-1].id)
    end = http.get(path, params={"order": "asc", "after": whole["first_id"]}).json()
    assert (end["data"], end["has_more"]) == ([], False)
    gpt.conversations.items.delete(whole["data"][3]["id"], conversation_id=begun.id)
    assert len(http.get(path).json()["data"]) == 6
    gone = {"after": whole["data"][3]["id"]}
    for wrong in ({"limit": 101}, {"limit": -1}, {"limit": "x"}, {"order": ""}, gone):
        refused = http.get(path, params=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"


def test_other_users_cannot_read_or_delete_stored_responses(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: one-key-of-some-length\nbob: another-key-of-some-length\n")
    keys.chmod(0o600)
    path = write_scripted_model(tmp_path / "scripted.gguf", {"plain": ANSWER})
    with start_server("--model", str(path), "--api-key-file", str(keys), models=()) as server:
        alice, bob = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"{key}-key-of-some-length", max_retries=0)
            for key in ("one", "another")
        )
        with alice, bob:
            kept = alice.responses.create(model="scripted", input="My secret is blue.")
            begun = alice.conversations.create(items=[{"role": "user", "content": "It is red, too."}])
            (item,) = alice.conversations.items.list(begun.id).data
            reference: Any = [{"type": "item_reference", "id": item.id}]
            missing: list[Callable[[], object]] = [
                lambda: bob.responses.retrieve(kept.id),
                lambda: bob.responses.delete(kept.id),
                lambda: bob.responses.cancel(kept.id),
                lambda: bob.responses.input_items.list(kept.id),
                lambda: bob.conversations.retrieve(begun.id),
                lambda: bob.conversations.update(begun.id, metadata={}),
                lambda: bob.conversations.delete(begun.id),
                lambda: bob.conversations.items.list(begun.id),
                lambda: bob.conversations.items.create(begun.id, items=[{"role": "user", "content": "x"}]),
                lambda: bob.conversations.items.retrieve(item.id or "", conversation_id=begun.id),
                lambda: bob.conversations.items.delete(item.id or "", conversation_id=begun.id),
                lambda: bob.responses.create(model="scripted", input="x", conversation=begun.id),
            ]
            for call in missing:
                with pytest.raises(openai.NotFoundError, match="not found"):
                    call()
            unknown: list[Callable[[], object]] = [
                lambda: bob.responses.create(model="scripted", input="x", previous_response_id=kept.id),
                lambda: bob.responses.compact(model="scripted", previous_response_id=kept.id),
                lambda: bob.responses.create(model="scripted", input=reference),
            ]
            for call in unknown:
                with pytest.raises(openai.BadRequestError, match="not stored here"):
                    call()
            assert alice.responses.retrieve(kept.id).id == kept.id
            assert alice.conversations.items.list(begun.id).data == [item]


def test_a_compacted_conversation_is_compacted_again(gpt: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "user", "content": "What is in the box?"},
        {"type": "function_call", "call_id": "c1", "name": "open", "arguments": '{"box": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a ball"},
        {"role": "developer", "content": "Answer in French."},
        {"role": "user", "content": "And in the other?"},
    ]
    once = gpt.responses.compact(model="scripted", input=items)
    assert [item.type for item in once.output] == ["message", "message", "compaction"]
    whole: list[Any] = [item.to_dict(warnings=False) for item in once.output]
    twice = gpt.responses.compact(model="scripted", input=[*whole, {"role": "user", "content": "Go on."}])
    assert [item.type for item in twice.output] == ["message"] * 3 + ["compaction"]
    assert len({item.id for item in (*once.output, *twice.output)}) == 5  # those of messages stay
