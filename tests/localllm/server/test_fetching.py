"""Images at URLs: only where a setting allows it, from public addresses only, bounded in size and time."""

import base64
import datetime
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from localllm.server import fetching
from localllm.server.errors import ApiError
from localllm.server.fetching import Fetcher, is_public
from tests.fakes.http_server import ForgivingServer, Quiet, serving
from tests.picture_files import png
from tests.projector_files import write_projector
from tests.waiting import PATIENCE_S

PUBLIC = "93.184.216.34"
PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "fec0::1", "5f00::1", "ff02::1",
    "198.18.0.1", "240.0.0.1",
]  # fmt: skip


class Pages(Quiet, BaseHTTPRequestHandler):
    """A picture, redirects, and answers that never end."""

    def do_GET(self) -> None:
        kind, _, rest = self.path.removeprefix("/").partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest.replace("~", "/"))
            self.end_headers()
        elif kind == "png":
            self._send(png(1))
        elif kind == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"some")
        elif kind in ("endless", "slow"):
            self.send_response(200)
            self.end_headers()
            while not self.server.ended.wait(0.05 if kind == "slow" else 0):  # type: ignore[attr-defined]
                self.wfile.write(b"x" * (1 if kind == "slow" else 1 << 20))
        else:
            self.send_error(404)

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ForgivingServer(("127.0.0.1", 0), Pages)
    server.ended = threading.Event()  # type: ignore[attr-defined]
    with serving(server):
        yield server.server_address[1]
        server.ended.set()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for example.test, and its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    today = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), today - day, today + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("example.test")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "certificate.pem"
    kept = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(kept + made.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.fixture(scope="module")
def tls_port(certificate: Path) -> Iterator[int]:
    """The same pages through TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ForgivingServer(("127.0.0.1", 0), Pages)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with serving(server):
        yield server.server_address[1]


@pytest.fixture
def fetcher(port: int, tls_port: int) -> Fetcher:
    """Every host but `inside` and `both` is public, and every connection leads to the servers of the test."""
    addresses = {"inside": ["10.0.0.7"], "both": [PUBLIC, "127.0.0.1"], "nowhere": []}
    ports = {(PUBLIC, 80): port, (PUBLIC, 443): tls_port}
    return Fetcher(
        lambda host, _port: addresses.get(host, [PUBLIC]),
        lambda address, timeout: socket.create_connection(("127.0.0.1", ports[address]), timeout),
    )


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses_are_public() -> None:
    assert all(map(is_public, (PUBLIC, "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8")))


@pytest.mark.parametrize("path", ["png", "to/~png", "to//png", "to/http:~~other~png", "to/to~to~png"])
def test_a_picture_is_fetched_also_after_redirects(fetcher: Fetcher, path: str) -> None:
    if path == "to/to~to~png":
        path = "to/~to~~to~~png"
    assert fetcher.fetch(f"http://example.test/{path}") == png(1)


@pytest.mark.parametrize(
    "url", ["https://example.test/png", "https://example.test/to/~png", "http://other.test/to/https:~~example.test~png"]
)
def test_a_picture_is_fetched_through_tls(
    fetcher: Fetcher, url: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert fetcher.fetch(url) == png(1)
    with pytest.raises(ApiError, match=r"image at other\.test cannot be fetched: the connection failed"):
        fetcher.fetch("https://other.test/png")  # the certificate is for another host


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://inside/png", "image at inside cannot be fetched: it has no public address"),
        ("http://both/png", "no public address"),
        ("http://nowhere/png", "no public address"),
        ("http://example.test/to/http:~~inside~png", "image at inside .* no public address"),
        ("http://example.test/to/file:~~~etc~passwd", "must be http or https"),
        ("http://example.test/missing", "status 404"),
        ("http://example.test/endless", "has more than 33,554,432 bytes"),
        ("http://example.test/cut", "cut off|connection failed"),
        ("https://example.test/png", "connection failed"),
        ("http://me:secret@example.test/png", "without a user's name"),
        ("http://example.test:99999/png", "not valid"),
        ("http:///png", "with a host"),
        ("http://example.test/a b.png", "without white space"),
        ("http://example.test/\r\nHost: inside", "without white space|not valid"),
    ],
)
def test_what_is_not_fetched(fetcher: Fetcher, url: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        fetcher.fetch(url)
    assert PUBLIC not in str(refused.value) and "10.0.0.7" not in str(refused.value)


def test_a_redirect_to_an_invalid_url_is_refused(fetcher: Fetcher) -> None:
    with pytest.raises(ApiError, match=r"example\.test cannot be fetched: it redirects to an invalid URL"):
        fetcher.fetch("http://example.test/to/http:~~[x")


def test_redirects_end(fetcher: Fetcher) -> None:
    with pytest.raises(ApiError, match="more than 3 redirects"):
        fetcher.fetch("http://example.test/to/~to~~to~~to~~to~~png")


def test_a_slow_host_is_left(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SECONDS", 0.3)
    with pytest.raises(ApiError, match="it took too long"):
        fetcher.fetch("http://example.test/slow")


def test_the_address_that_was_checked_is_the_one_that_is_used(port: int) -> None:
    answers = iter([[PUBLIC], ["127.0.0.1"]])  # as of a host that changes its address between the check and the use
    used: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        used.append(address)
        return socket.create_connection(("127.0.0.1", port), timeout)

    assert Fetcher(lambda _host, _port: next(answers), connect).fetch("http://rebinding.test/png") == png(1)
    assert used == [(PUBLIC, 80)]


INJECTED = """
import socket
from localllm.server import contents, fetching
contents.FETCHER = fetching.Fetcher(
    lambda host, _port: ["10.0.0.7"] if host == "inside" else ["93.184.216.34"],
    lambda address, timeout: socket.create_connection(("127.0.0.1", {ports}[address[1]]), timeout),
)
"""


@pytest.fixture(scope="module")
def client(
    start_server: Any,
    model_files: Path,
    tmp_path_factory: pytest.TempPathFactory,
    port: int,
    tls_port: int,
    certificate: Path,
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("seeing")
    shutil.copyfile(model_files / "stories260K-F32.gguf", folder / "seer.gguf")
    write_projector(folder / "mmproj-seer.gguf", "gemma4uv")
    settings = {"LOCALLLM_FETCH_IMAGES": "true", "LOCALLLM_IMAGE_MAX_TOKENS": "16", "SSL_CERT_FILE": str(certificate)}
    begins = INJECTED.format(ports={80: port, 443: tls_port})
    model = str(folder / "seer.gguf")
    with (
        start_server("--model", model, begins=begins, **settings) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def bodies(image: str, source: dict[str, str]) -> dict[str, dict[str, Any]]:
    """A question about an image in every protocol."""
    chat = {"type": "image_url", "image_url": {"url": image}}
    result = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    return {
        "/api/chat": {"messages": [{"role": "user", "content": "?", "images": [image]}]},
        "/api/generate": {"prompt": "?", "images": [image]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [chat]}]},
        "/v1/chat/completions#tool": {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "tool_calls": result},
                {"role": "tool", "tool_call_id": "1", "content": [chat]},
            ]
        },
        "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": image}]}]},
        "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
    }


@pytest.mark.parametrize("url", ["http://example.test/png", "https://example.test/png"])
def test_every_protocol_fetches_what_it_would_take_as_base64(client: httpx.Client, url: str) -> None:
    data = base64.b64encode(png(1)).decode()
    fetched = bodies(url, {"type": "url", "url": url})
    sent = bodies(f"data:image/png;base64,{data}", {"type": "base64", "media_type": "image/png", "data": data})
    for path, body in fetched.items():
        told = []
        for one in (body, sent[path]):
            common = {"model": "seer", "stream": False, "max_tokens": 1, "max_output_tokens": 1, "temperature": 0}
            reply = client.post(path.partition("#")[0], json={**common, "options": {"num_predict": 1}, **one})
            assert reply.status_code == 200, (path, reply.text)
            answer = reply.json()
            told.append(answer.get("pictures") or answer["choices"][0]["pictures"])
        assert told[0] == told[1] and told[0][0]["width"] == 40, path


def test_every_protocol_refuses_private_addresses(client: httpx.Client) -> None:
    url = "http://inside/png"
    for path, body in bodies(url, {"type": "url", "url": url}).items():
        more = {"model": "seer", "stream": False, "max_tokens": 1, "max_output_tokens": 1}
        reply = client.post(path.partition("#")[0], json={**more, "options": {"num_predict": 1}, **body})
        if path.endswith("#tool"):  # the user cannot change what a tool has sent
            assert reply.status_code == 200 and "no public address" in reply.text, reply.text
        else:
            assert reply.status_code == 400 and "no public address" in reply.text, (path, reply.text)


def test_many_urls_are_not_all_fetched(client: httpx.Client) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://example.test/png"}}
    body = {"model": "seer", "messages": [{"role": "user", "content": [part] * 33}]}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "at most 32 images of a request are fetched" in reply.text
