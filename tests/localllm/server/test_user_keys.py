"""Keys for one user and for several, who do not share cached prefixes."""

import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.errors import SettingsError
from localllm.server.keys import Key, namespace_of_key, read_keys
from localllm.server.options import server_options
from localllm.settings import Settings
from tests.localllm.server.conftest import MODEL, SLOWLY, StartServer
from tests.waiting import PATIENCE_S

SEVERAL = "# who may ask\nalice: wonderland\n\nbob:  builder # 1\n"


def keys_of(tmp_path: Path, text: str) -> tuple[Key, ...]:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    return read_keys(None, str(file))


def test_one_key_or_one_for_each_user(tmp_path: Path) -> None:
    assert read_keys(None, None) == ()
    assert read_keys("a: b", None) == (Key("", "a: b"),)
    assert keys_of(tmp_path, "# one\nsesame open\n") == (Key("", "sesame open"),)
    assert keys_of(tmp_path, "alice: wonderland") == (Key("alice", "wonderland"),)
    assert keys_of(tmp_path, "alice: wonderland\n\n#\nbob:\tbuilder") == (
        Key("alice", "wonderland"),
        Key("bob", "builder"),
    )
    assert "wonderland" not in repr(keys_of(tmp_path, "alice: wonderland\nbob: builder"))


@pytest.mark.parametrize(
    "text", ["a: one\ntwo", "a: one\na: two", "a: one\nb: one", "# nothing", "one\ntwo", "a b: one\nb: two", SEVERAL]
)
def test_invalid_key_lists_are_refused_without_revealing_keys(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        keys_of(tmp_path, text)
    assert not any(secret in str(refused.value) for secret in ("one", "two", "wonderland", "builder"))


def test_each_of_several_users_has_a_namespace() -> None:
    alone = [Key("", "sesame")]
    assert [namespace_of_key(given, alone) for given in (b"sesame", b"sesam", b"")] == ["", None, None]
    several = [Key("alice", "wonderland"), Key("bob", "builder")]
    found = [namespace_of_key(given, several) or "" for given in (b"wonderland", b"builder", b"wonderland")]
    assert found[0] == found[2] != found[1] and "" not in found
    assert not any(secret in "".join(found) for secret in ("alice", "wonderland"))
    assert namespace_of_key(b"alice", several) is None


def test_programs_of_this_machine_take_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice: wonderland\nbob: builder\n", encoding="utf-8")
    assert server_options(Settings(api_key_file=str(file))).api_key == "wonderland"


def test_users_do_not_share_prefixes(start_server: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice: wonderland\nbob: builder\n", encoding="utf-8")
    prompt = "Once upon a time there was a little girl who lived in a big house. " * 3
    body = {"model": MODEL, "prompt": prompt, "stream": False, "options": {"num_predict": 2, "temperature": 0}}
    with start_server("--api-key-file", str(file)) as server:

        def ask(key: str) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{server.url}/api/generate", json=body, headers=headers, timeout=PATIENCE_S).json()

        answers = [ask(key) for key in ("wonderland", "builder", "wonderland", "builder")]
        cached = [answer["prompt_eval_cached_count"] for answer in answers]
        assert cached[:2] == [0, 0] and cached[2] == cached[3] > 30
        assert len({answer["response"] for answer in answers}) == 1
        assert "error" in ask("alice")


def test_a_user_who_fills_the_queue_leaves_room_for_another(start_server: StartServer, tmp_path: Path) -> None:
    """On connections that stay open while the engine is slow, like a program that keeps sending requests."""
    file = tmp_path / "keys"
    file.write_text("alice: wonderland\nbob: builder\n", encoding="utf-8")
    body = {"model": MODEL, "prompt": "Once", "options": {"num_predict": 400, "temperature": 0}}
    with (
        start_server("--api-key-file", str(file), begins=SLOWLY, LOCALLLM_MAX_QUEUE="6") as server,
        contextlib.ExitStack() as stack,
    ):

        def ask(key: str) -> int:
            client = stack.enter_context(httpx.Client(timeout=PATIENCE_S))
            asked = client.stream(
                "POST", f"{server.url}/api/generate", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            return stack.enter_context(asked).status_code

        assert [ask("wonderland") for _ in range(8)] == [200] * 6 + [503] * 2
        assert [ask("builder") for _ in range(4)] == [200] * 3 + [503]
        assert ask("wonderland") == 503


def test_without_users_each_address_is_a_client(start_server: StartServer) -> None:
    body = {"model": MODEL, "prompt": "Once", "options": {"num_predict": 400, "temperature": 0}}
    with start_server(begins=SLOWLY, LOCALLLM_MAX_QUEUE="4") as server, contextlib.ExitStack() as stack:

        def ask(address: str) -> int:
            client = httpx.Client(timeout=PATIENCE_S, transport=httpx.HTTPTransport(local_address=address))
            asked = stack.enter_context(client).stream("POST", f"{server.url}/api/generate", json=body)
            return stack.enter_context(asked).status_code

        assert [ask("127.0.0.1") for _ in range(5)] == [200] * 4 + [503]
        assert [ask("127.0.0.2") for _ in range(3)] == [200] * 2 + [503]
