import contextlib
import gzip
import hashlib
import json
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.library.errors import LibraryError, PullError
from localllm.library.partial import PartialFile
from localllm.library.pull import pull
from localllm.library.web import Remote, get, new_client
from tests.localllm.library.model_server import Answer, ModelServer, cut, refuse
from tests.localllm.library.store_contents import SETTINGS, no_model_and_no_half_file, stored


def test_cut_connections_go_on_where_they_were(server: ModelServer, big_gguf: bytes) -> None:
    server.add_ollama("library/big", "latest", {"model": big_gguf})
    server.faults.append(cut(40, 10_000))
    assert pull(f"{server.host}/library/big", SETTINGS).path.read_bytes() == big_gguf
    got = sum(1 for headers in server.fetched("/blobs/") if not headers["range"].endswith("-0"))
    assert got == -(-len(big_gguf) // (64 << 10)) + 40


@pytest.mark.parametrize("status", [429, 503, 500])
def test_a_busy_server_is_asked_again(server: ModelServer, tiny_gguf: bytes, status: int) -> None:
    server.add_ollama("library/tiny", "latest", {"model": tiny_gguf})
    server.faults.append(refuse(3, status, {"Retry-After": "1"}))
    assert pull(f"{server.host}/library/tiny", SETTINGS).path.read_bytes() == tiny_gguf


@pytest.mark.parametrize(
    "told", ["²", "9" * 5000, "-1", "soon", "Fri, 31 Dec 99999 23:59:59 GMT", "Wed, 21 Oct 2035 07:28:00 +99999999999"]
)
def test_a_retry_after_that_says_nothing_is_left_aside(server: ModelServer, tiny_gguf: bytes, told: str) -> None:
    server.add_ollama("library/tiny", "latest", {"model": tiny_gguf})
    server.faults.append(refuse(2, 503, {"Retry-After": told}))
    assert pull(f"{server.host}/library/tiny", SETTINGS).path.read_bytes() == tiny_gguf


@pytest.mark.parametrize("length", ["²", "9" * 5000, "1e3", ""])
@pytest.mark.parametrize("ranges", [True, False])
def test_non_numeric_lengths_are_refused(
    server: ModelServer, home: Path, big_gguf: bytes, length: str, ranges: bool
) -> None:
    server.add_ollama("library/big", "latest", {"model": big_gguf})
    server.routes["/x.gguf"] = big_gguf
    server.ranges = ranges

    def lie(path: str, answer: Answer) -> None:
        if "manifests" not in path and ranges:
            answer.headers["Content-Range"] = f"bytes 0-0/{length}"
        elif "manifests" not in path:
            answer.told_length, answer.headers["Content-Length"] = False, length

    server.faults.append(lie)
    for name in (f"{server.host}/library/big", f"{server.url}/x.gguf"):
        with pytest.raises(PullError):
            pull(name, SETTINGS)
    no_model_and_no_half_file(home)


def test_a_busy_server_is_not_asked_for_ever(server: ModelServer, home: Path) -> None:
    server.faults.append(refuse(1000, 429))
    with pytest.raises(PullError, match="429"):
        pull(f"{server.host}/library/tiny", SETTINGS)
    assert len(server.requests) == 6
    no_model_and_no_half_file(home)


def test_a_host_that_is_not_there_is_given_up_soon(home: Path, command: Callable[..., int], capsys: Any) -> None:
    assert command("run", "127.0.0.1:9/library/x", "Hello") == 2
    err = capsys.readouterr().err
    assert "There is no model '127.0.0.1:9/library/x' on this machine" in err
    assert "Tried 2 times" in err


def test_a_file_that_changes_while_it_is_pulled_is_noticed(server: ModelServer, home: Path, big_gguf: bytes) -> None:
    server.routes["/x.gguf"] = big_gguf
    server.headers["/x.gguf"] = {"ETag": '"v1"'}

    def change(_path: str, answer: Answer) -> None:
        if len(server.requests) > 20:  # as RFC 9110 requires if If-Range names another version
            answer.status, answer.body = 200, big_gguf
            answer.headers.pop("Content-Range", None)

    server.faults.append(change)
    with pytest.raises(PullError, match="for bytes"):
        pull(f"{server.url}/x.gguf", SETTINGS)
    no_model_and_no_half_file(home)
    server.faults.clear()
    newer = big_gguf[:-1] + b"!"
    server.routes["/x.gguf"] = newer
    server.headers["/x.gguf"] = {"ETag": '"v2"'}
    assert pull(f"{server.url}/x.gguf", SETTINGS).path.read_bytes() == newer


def test_an_address_that_does_not_tell_a_length_is_refused(server: ModelServer, home: Path, big_gguf: bytes) -> None:
    server.routes["/x.gguf"] = big_gguf
    server.ranges = False

    def endless(_path: str, answer: Answer) -> None:
        answer.told_length = False

    server.faults.append(endless)
    with pytest.raises(PullError, match="does not say how long"):
        pull(f"{server.url}/x.gguf", SETTINGS)
    no_model_and_no_half_file(home)


def test_a_stalled_server_is_left(
    server: ModelServer, home: Path, big_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.library.web.STALL_S", 0.05)
    server.add_ollama("library/big", "latest", {"model": big_gguf})

    def stall(path: str, answer: Answer) -> None:
        if "/blobs/" in path and len(answer.body) > 1:
            answer.pause_s = 0.5

    server.faults.append(stall)
    with pytest.raises(PullError, match="pull again"):
        pull(f"{server.host}/library/big", SETTINGS)
    no_model_and_no_half_file(home)


def flip(path: str, answer: Answer) -> None:
    if "/blobs/" in path or "/resolve/" in path:
        answer.body = answer.body[:-1] + bytes([answer.body[-1] ^ 1])


def test_a_wrong_digest_leaves_nothing(server: ModelServer, home: Path, big_gguf: bytes) -> None:
    server.add_ollama("library/big", "latest", {"model": big_gguf})
    server.add_hub("user/big", {"big-Q8_0.gguf": big_gguf})
    server.faults.append(flip)
    for name in (f"{server.host}/library/big", "hf.co/user/big"):
        with pytest.raises(PullError, match=f"instead of sha256:{hashlib.sha256(big_gguf).hexdigest()}"):
            pull(name, SETTINGS)
        assert stored(home) == {}
    server.faults.clear()
    assert pull("hf.co/user/big", SETTINGS).path.read_bytes() == big_gguf


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("change", [-1000, 1000])
def test_a_wrong_length_is_reported(
    server: ModelServer, home: Path, big_gguf: bytes, change: int, ranges: bool
) -> None:
    digest = server.add_ollama("library/big", "latest", {"model": big_gguf})["model"]
    server.ranges = ranges
    server.routes[f"/v2/library/big/blobs/{digest}"] = (big_gguf + bytes(1000))[: len(big_gguf) + change]
    with pytest.raises(PullError, match=rf"has {len(big_gguf) + change} bytes of .* its listing says {len(big_gguf)}"):
        pull(f"{server.host}/library/big", SETTINGS)
    no_model_and_no_half_file(home)


def test_more_than_was_asked_for_is_refused(server: ModelServer, home: Path, big_gguf: bytes) -> None:
    server.add_ollama("library/big", "latest", {"model": big_gguf})

    def longer(path: str, answer: Answer) -> None:
        if "/blobs/" in path and answer.status == 206:
            answer.body, answer.told_length = answer.body + bytes(1 << 20), False

    server.faults.append(longer)
    with pytest.raises(PullError, match=r"more of .* than requested"):
        pull(f"{server.host}/library/big", SETTINGS)
    no_model_and_no_half_file(home)


def test_another_range_than_asked_for_is_refused(server: ModelServer, home: Path, big_gguf: bytes) -> None:
    server.add_ollama("library/big", "latest", {"model": big_gguf})

    def shift(path: str, answer: Answer) -> None:
        if "/blobs/" in path and len(answer.body) > 1:
            answer.headers["Content-Range"] = f"bytes 0-{len(answer.body) - 1}/{len(big_gguf)}"

    server.faults.append(shift)
    with pytest.raises(PullError, match="for bytes"):
        pull(f"{server.host}/library/big", SETTINGS)
    no_model_and_no_half_file(home)


def test_a_downloaded_file_that_is_not_a_model_is_removed(server: ModelServer, home: Path) -> None:
    server.add_ollama("library/x", "latest", {"model": b"#!/bin/sh\necho this is no model at all\n"})
    with pytest.raises(PullError, match="not a GGUF file"):
        pull(f"{server.host}/library/x", SETTINGS)
    assert stored(home) == {}


def test_tokens_are_sent_to_no_other_host(
    server: ModelServer, tiny_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = f"/user/r/resolve/{'ab' * 20}/r-Q8_0.gguf"
    server.add_hub("user/r", {"r-Q8_0.gguf": tiny_gguf})
    with ModelServer().running() as other:
        other.routes["/cdn/r"] = tiny_gguf
        server.redirects[path] = f"{other.url}/cdn/r"
        pull("hf.co/user/r", SETTINGS)
        assert {headers["authorization"] for _, headers in server.requests} == {"Bearer hf_secret"}
        assert other.requests
        assert not any("authorization" in headers or "cookie" in headers for _, headers in other.requests)
    for _, headers in server.requests:
        headers.clear()
    server.add_ollama("library/r", "latest", {"model": tiny_gguf, "system": b"new"})
    pull(f"{server.host}/library/r", SETTINGS)
    assert not any("authorization" in headers for _, headers in server.requests)


def test_a_redirect_is_followed_once_and_again_when_it_expires(server: ModelServer, big_gguf: bytes) -> None:
    digest = server.add_ollama("library/big", "latest", {"model": big_gguf})["model"]
    with ModelServer().running() as cdn:
        cdn.routes["/signed"] = big_gguf
        server.redirects[f"/v2/library/big/blobs/{digest}"] = f"{cdn.url}/signed"
        pull(f"{server.host}/library/big", SETTINGS)
        chunks = -(-len(big_gguf) // (64 << 10))
        assert len(server.fetched(digest)) <= 1 + 8  # for the range probe, and at most each connection
        assert len(cdn.fetched("/signed")) == chunks + 1
        shutil.rmtree(Path.home() / "localllm")
        server.requests.clear()
        cdn.routes["/signed-anew"] = big_gguf

        def expire(path: str, answer: Answer) -> None:
            if path == "/signed" and len(cdn.requests) > chunks + 20:
                server.redirects[f"/v2/library/big/blobs/{digest}"] = f"{cdn.url}/signed-anew"
                answer.status, answer.body, answer.headers = 403, b"", {}

        cdn.faults.append(expire)
        assert pull(f"{server.host}/library/big", SETTINGS).path.read_bytes() == big_gguf
        assert cdn.fetched("/signed-anew")


def test_where_a_registry_wants_to_be_authenticated_nothing_is_sent(server: ModelServer, home: Path) -> None:
    with ModelServer().running() as evil:
        realm = f'Bearer realm="{evil.url}/token",service="x"'
        server.faults.append(refuse(1000, 401, {"WWW-Authenticate": realm}))
        with pytest.raises(PullError, match="requires a token"):
            pull(f"{server.host}/library/x", SETTINGS)
        assert evil.requests == []
    no_model_and_no_half_file(home)


@pytest.mark.parametrize("target", ["{url}/v2/library/x/manifests/latest", "file:///etc/passwd", "gopher://x/y"])
def test_redirects_that_lead_nowhere_end(server: ModelServer, home: Path, target: str) -> None:
    server.redirects["/v2/library/x/manifests/latest"] = target.format(url=server.url)
    with pytest.raises(PullError, match="redirects"):
        pull(f"{server.host}/library/x", SETTINGS)
    assert len(server.requests) <= 6
    no_model_and_no_half_file(home)


@pytest.mark.parametrize("proxy", ["http://a:b", "socks9://host", "socks5://host"])
def test_a_proxy_that_cannot_be_used_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    if proxy.startswith("socks5"):
        monkeypatch.setitem(sys.modules, "socksio", None)  # as if it was not installed
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(LibraryError, match=r"The proxy that the environment names cannot be used: .*Correct or unset"):
        pull("hf.co/user/model", SETTINGS)


def test_an_address_that_is_malformed_is_refused() -> None:
    with (
        new_client() as client,
        pytest.raises(PullError, match="is not an address"),
        get(client, Remote("http://a:b/"), {}),
    ):
        pass


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../../../x",
        "sha256:" + "a" * 63,
        "sha256:" + "A" * 64,
        "md5:" + "a" * 64,
        "",
        None,
        5,
        "../x",
        "sha256-" + "a" * 64,
    ],
)
def test_digests_that_are_none_reach_no_path(server: ModelServer, home: Path, digest: object) -> None:
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest, "size": 10}
    server.routes["/v2/library/x/manifests/latest"] = json.dumps({"layers": [layer]}).encode()
    with pytest.raises(LibraryError, match="is not a digest"):
        pull(f"{server.host}/library/x", SETTINGS)
    sibling = {"rfilename": "x-Q8_0.gguf", "lfs": {"size": 10, "sha256": digest}}
    server.routes["/api/models/user/x"] = json.dumps({"sha": "ab" * 20, "siblings": [sibling]}).encode()
    with pytest.raises(PullError, match="is not a digest"):
        pull("hf.co/user/x", SETTINGS)
    assert len(server.requests) == 2
    assert stored(home) == {}


@pytest.mark.parametrize(
    "manifest", [b"", b"[]", b"{}", b'{"layers": {}}', b"x" * (2 << 20), b'{"layers": []}', b'{"layers": [null]}']
)
def test_manifests_that_are_none(server: ModelServer, home: Path, manifest: bytes) -> None:
    server.routes["/v2/library/x/manifests/latest"] = manifest
    server.routes["/api/models/user/x"] = manifest
    for name in (f"{server.host}/library/x", "hf.co/user/x"):
        with pytest.raises(LibraryError) as refused:
            pull(name, SETTINGS)
        assert "localllm rm" not in str(refused.value)  # nothing here to remove
    assert stored(home) == {}


def test_what_a_registry_packs_is_not_unpacked(server: ModelServer, home: Path) -> None:
    def packed(_path: str, answer: Answer) -> None:
        answer.headers["Content-Encoding"] = "gzip"

    server.faults.append(packed)
    bomb = gzip.compress(b'{"layers": [' + bytes(100 << 20))
    for path in ("/v2/library/x/manifests/latest", "/api/models/user/x"):
        server.routes[path] = bomb
    tracemalloc.start()
    try:
        for name in (f"{server.host}/library/x", "hf.co/user/x"):
            with pytest.raises(LibraryError):
                pull(name, SETTINGS)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert stored(home) == {}


def test_a_registry_cannot_link_to_local_files(server: ModelServer, home: Path, tiny_gguf: bytes) -> None:
    (home / "secret.gguf").write_bytes(tiny_gguf)
    layer = {"mediaType": "application/vnd.localllm.link", "path": str(home / "secret.gguf")}
    server.routes["/v2/library/x/manifests/latest"] = json.dumps({"layers": [layer]}).encode()
    with pytest.raises(PullError, match="has no GGUF file"):
        pull(f"{server.host}/library/x", SETTINGS)
    no_model_and_no_half_file(home)


def test_an_invalid_file_name_is_reported(server: ModelServer, home: Path) -> None:
    lfs = {"size": 10, "sha256": "a" * 64}
    listing = {"sha": "ab" * 20, "siblings": [{"rfilename": "\ud800-Q8_0.gguf", "lfs": lfs}]}
    server.routes["/api/models/user/x"] = json.dumps(listing).encode()
    with pytest.raises(PullError, match="list of files cannot be read"):
        pull("hf.co/user/x", SETTINGS)


@pytest.mark.parametrize("path", ["../../../evil-Q8_0.gguf", "/etc/evil-Q8_0.gguf", "a\\..\\evil-Q8_0.gguf"])
def test_file_names_of_a_repository_reach_no_path(server: ModelServer, home: Path, tiny_gguf: bytes, path: str) -> None:
    server.add_hub("user/x", {path: tiny_gguf})
    server.routes.update({route.replace("/../../..", ""): data for route, data in server.routes.items()})
    before = {file for file in home.parent.rglob("*") if file.is_file()}
    with contextlib.suppress(LibraryError):
        pull("hf.co/user/x", SETTINGS)
    new = {file for file in home.parent.rglob("*") if file.is_file()} - before
    assert all(file.is_relative_to(home / "localllm/models") for file in new)


def test_a_partial_file_that_has_another_name_is_not_written_over(tmp_path: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("dear")
    (tmp_path / "key.part").hardlink_to(letter)
    partial = PartialFile(tmp_path, "key", 9, "validator")
    partial.write(0, b"new bytes")
    partial.keep_as(tmp_path / "blob")
    partial.close()
    assert letter.read_text() == "dear"
    assert (tmp_path / "blob").read_bytes() == b"new bytes"
