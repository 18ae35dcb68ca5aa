"""Attacks a running `localllm serve` and the files that it keeps, and shows the outcome of each attack.

    attack.py [MODEL.gguf] [OTHER.gguf] [--only WORD]

Without models, the built-in one and a copy with another template are served. Sends what attackers send, over plain
sockets where a client library would correct it; damages files that the server left and starts it again; fills a disk
and makes the server run out of memory, where it may mount file systems and make control groups (as root on Linux).
After each attack the server must answer /health, and a prompt as before. Shows a row for each attack; the exit status
is 1 if one succeeded.
"""

import argparse
import base64
import contextlib
import json
import re
import socket
import statistics
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.attack_files import FILE_ATTACKS
from benchmarks.attack_stage import PATIENCE_S, Served, SkippedError, Stage, answer_of, check
from benchmarks.attack_time import TIME_ATTACKS
from benchmarks.engine_tools import table

Attack = Callable[[Served], str]


def statuses(answers: list[int]) -> str:
    """How often each status occurred."""
    return ", ".join(f"{count} x {status}" for status, count in sorted(Counter(answers).items()))


def raw(served: Served, data: bytes, seconds: float = 10) -> int:
    """Send raw bytes; return the status of the answer, 0 for a closed connection."""
    with socket.create_connection(("127.0.0.1", served.port), seconds) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        try:
            found = re.match(rb"HTTP/1.1 (\d+)", connection.recv(4096))
        except OSError:
            return 0
        return int(found[1]) if found else 0


def request(path: str, body: Any) -> bytes:
    """A request with a JSON body, for a socket."""
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def refused(connection: socket.socket) -> bool:
    """Whether the server has answered at once that it is busy (503)."""
    connection.settimeout(0.5)
    try:
        return b" 503 " in connection.recv(100)
    except TimeoutError:
        return False


def posted(served: Served, path: str, body: Any) -> int:
    """Post a body and return the status; anything but bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(served.url + path, content=data, timeout=PATIENCE_S).status_code


def hosts_and_origins(served: Served) -> str:
    """Host names that a page could have rebound, and foreign origins, on every route."""
    paths = httpx.get(served.url + "/openapi.json").json()["paths"]
    found = []
    for path, methods in paths.items():
        for method in methods:
            for headers in (
                {"Host": "evil.example"},
                {"Host": "127.0.0.1.evil.example"},
                {"Origin": "http://evil.example"},
            ):
                url = served.url + re.sub(r"\{.*?\}", "x", path)
                found.append(httpx.request(method, url, headers=headers, timeout=PATIENCE_S).status_code)
    check(set(found) == {403}, statuses(found))
    return f"{len(paths)} routes: {statuses(found)}"


def keys(served: Served) -> str:
    """Wrong keys, and whether a key that begins like the right one takes longer to refuse."""
    with served.stage.serve("--api-key-file", str(served.stage.key_file)) as other, httpx.Client() as client:
        key = served.stage.key

        def ask(given: str | None, path: str = "/api/tags") -> int:
            headers = {"Authorization": f"Bearer {given}"} if given is not None else {}
            return client.get(other.url + path, headers=headers).status_code

        wrong = [ask(given) for given in (None, key[:-1], key + "x", key.upper(), "x")]
        check(set(wrong) == {401} and ask(key) == 200, statuses(wrong))
        times: dict[str, list[float]] = {"x" + key[1:]: [], key[:-1] + "x": []}
        for _ in range(1500):
            for given, spent in times.items():
                began = time.perf_counter()
                ask(given)
                spent.append(time.perf_counter() - began)
        first, last = (1e6 * statistics.median(spent) for spent in times.values())
    return f"{statuses(wrong)}; first letter wrong {first:.0f} us, last letter wrong {last:.0f} us"


def paths_as_names(served: Served) -> str:
    """Paths and invalid digests, wherever a name or digest is expected."""
    names = [
        "../../../etc/passwd",
        "/etc/passwd",
        "file:///etc/passwd",
        "a/../../b",
        "x" * 100_000,
        "\0",
        "..",
        "%2e%2e/x",
    ]
    routes = [(f"/{path}", "model") for path in ("api/generate", "api/show", "v1/completions", "tokenize", "api/pull")]
    routes += [("/api/delete", "model"), ("/api/copy", "source"), ("/api/create", "from")]
    found = []
    for name in names:
        for path, field in routes:
            body = {field: name, "prompt": "x", "content": "x", "destination": name, "stream": False}
            body |= {"model": "new"} if path == "/api/create" else {}
            method = "DELETE" if path == "/api/delete" else "POST"
            answer = httpx.request(method, served.url + path, json=body, timeout=PATIENCE_S)
            check("root:" not in answer.text, f"{path} shows the file")
            found.append(answer.status_code)
        digest = httpx.URL(served.url).copy_with(
            raw_path=b"/api/blobs/sha256:" + name.encode()[:200].replace(b"\0", b"%00")
        )
        found.append(httpx.head(digest).status_code)
    check(set(found) <= {400, 404, 405}, statuses(found))
    return statuses(found)


def local_registry(served: Served) -> str:
    """A pull from an address of the local network."""
    with socket.create_server(("127.0.0.1", 0)) as registry:
        registry.settimeout(1)
        status = posted(served, "/api/pull", {"model": f"127.0.0.1:{registry.getsockname()[1]}/library/x"})
        with contextlib.suppress(TimeoutError):
            registry.accept()
            check(False, "the server asked it")
    check(status == 400, str(status))
    return f"{status}, nobody was asked"


def framing(served: Served) -> str:
    """Bodies and headers that are too large, compressed, or framed twice."""
    megabyte = b"fffff\r\n" + b"x" * 0xFFFFF + b"\r\n"
    start = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\n"
    found = {
        "200 KB of headers": raw(served, start + b"X: " + b"y" * 200_000 + b"\r\n\r\n"),
        "5,000 headers": raw(served, start + b"".join(b"X-%d: y\r\n" % i for i in range(5000)) + b"\r\n"),
        "gzip": raw(served, start + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"),
        "10 GB announced": raw(served, start + b"Content-Length: 10000000000\r\n\r\n{}"),
        "65 MB in chunks": raw(served, start + b"Transfer-Encoding: chunked\r\n\r\n" + megabyte * 65),
        "two lengths": raw(served, start + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        "negative length": raw(served, start + b"Content-Length: -1\r\n\r\n"),
        "no HTTP": raw(served, b"\x16\x03\x01" * 100),
    }  # fmt: skip
    check(all(status == 0 or 400 <= status < 500 for status in found.values()), str(found))
    return ", ".join(f"{name}: {status or 'closed'}" for name, status in found.items())


def json_bombs(served: Served) -> str:
    """Excessive depth, values, digits and numbers in JSON."""
    bombs = [b"[" * 1_000_000, b'{"a":' * 100_000, b"[" + b"1," * 3_000_000 + b"1]", b"[" + b"[]," * 3_000_000 + b"[]]",
             b'{"model": "x", "prompt": ' + b"9" * 100_000 + b"}", b'{"num": 1e999999}', b'{"a": NaN}', b"\xff\xfe{}",
             b'{"model": "%s"}' % (b"x" * 10_000_000), b"{" + b'"a": 1, ' * 1_000_000 + b'"b": 1}']  # fmt: skip
    found = [
        posted(served, path, bomb) for bomb in bombs for path in ("/api/chat", "/v1/chat/completions", "/v1/messages")
    ]
    check(all(400 <= status < 500 for status in found), statuses(found))
    return statuses(found)


def numbers(served: Served) -> str:
    """Counts and options far out of range."""
    values = (10**9, -(10**9), 10**400, 1e308, -1, "many", None, [], {}, True)
    found = []
    for value in values:
        body = {"model": served.model, "prompt": "x", "max_tokens": 2}
        found += [
            posted(served, "/v1/completions", body | {name: value})
            for name in ("n", "best_of", "logprobs", "seed", "top_p")
        ]
        options = {"num_predict": 2}
        found += [
            posted(served, "/api/generate", {**body, "stream": False, "options": options | {name: value}})
            for name in ("top_k", "temperature", "repeat_last_n", "num_ctx", "num_keep", "min_p")
        ]  # fmt: skip
    check(set(found) <= {200, 400, 422, 503}, statuses(found))
    return statuses(found)


def grammars(served: Served) -> str:
    """Schemas, patterns and grammars that are deep, large or ambiguous."""
    deep: Any = {"type": "string"}
    for _ in range(10_000):
        deep = {"anyOf": [deep]}
    deep_json = b'{"anyOf": [' * 10_000 + b"{}" + b"]}" * 10_000
    wide = {"type": "object", "properties": {f"p{i}": {"enum": [f"v{j}" for j in range(100)]} for i in range(300)}}
    patterns = ("(a{1,1000}){1,1000}{1,1000}", "(a+)+$", "(" * 5000, "(?:a|a?)+b")
    formats: list[Any] = [wide, *({"type": "string", "pattern": pattern} for pattern in patterns)]
    formats += [{"type": "string", "maxLength": 10**9}, {"$ref": "#"}, {"allOf": [{"$ref": "#"}] * 50}]
    body = {"model": served.model, "prompt": "x", "stream": False, "options": {"num_predict": 3}}
    found = [posted(served, "/api/generate", body | {"format": each}) for each in formats]
    found.append(posted(served, "/api/generate", json.dumps(body).encode()[:-1] + b', "format": ' + deep_json + b"}"))
    for text in ('root ::= root root | "a"', "root ::= (((" * 5000, 'root ::= "a"{1,1000000000}', "root ::= x"):
        found.append(posted(served, "/v1/completions", {**body, "max_tokens": 3, "grammar": text}))
    check(set(found) <= {200, 400}, statuses(found))
    return statuses(found)


def pictures(served: Served) -> str:
    """A PNG of 50,000 x 50,000 in a few bytes, invalid base64, 12 MB of base64, and addresses of pictures."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10**7), 9))
        + chunk(b"IEND", b"")
    )
    found = []
    for image in (
        base64.b64encode(bomb).decode(),
        "%%%",
        "A" * 12_000_000,
        "http://127.0.0.1:1/x.png",
        "file:///etc/passwd",
    ):
        message = {"role": "user", "content": "x", "images": [image]}
        found.append(posted(served, "/api/chat", {"model": served.model, "messages": [message], "stream": False}))
    check(all(400 <= status < 500 for status in found), statuses(found))
    return statuses(found)


def templates(served: Served) -> str:
    """Hostile templates and template arguments in requests."""
    loop = "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    body = {"model": served.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": False}
    found = []
    for text in (loop, escape):
        arguments = {"chat_template": text, "chat_template_kwargs": {"chat_template": text, "messages": text}}
        for path in ("/api/chat", "/v1/chat/completions", "/v1/messages", "/apply-template"):
            found += [posted(served, path, {**body, name: value}) for name, value in arguments.items()]
        found.append(posted(served, "/api/generate", {**body, "prompt": "x", "template": text}))
    check(set(found) <= {200, 400}, statuses(found))
    return f"{statuses(found)} (200: the field is ignored, and the log says so)"


def connections(served: Served) -> str:
    """Connections that send nothing, headers and bodies byte by byte, readers that never read, and 1,000 requests."""
    address = ("127.0.0.1", served.port)
    opened = [socket.create_connection(address) for _ in range(400)]
    for connection in opened[100:200]:
        connection.sendall(b"GET /api/tags HTTP/1.1\r\nHost: local")
    for connection in opened[200:300]:
        connection.sendall(b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    endless = request("/api/generate", {"model": served.model, "prompt": "Once", "options": {"num_predict": 3000}})
    for connection in opened[300:]:
        connection.sendall(endless)
    began = time.perf_counter()
    check(httpx.get(served.url + "/health", timeout=PATIENCE_S).status_code == 200, "no health")
    health = time.perf_counter() - began
    for connection in opened:
        connection.close()
    served.quiet()
    return f"/health in {1000 * health:.0f} ms beside 400 of them; then all work ends"


def one_client(served: Served) -> str:
    """A client that floods the server with requests, and a second one."""
    with served.stage.serve(LOCALLLM_MAX_QUEUE="20", LOCALLLM_PARALLEL="1") as other:
        answer_of(other)  # it is loaded
        body = {"model": other.model, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": False}
        opened = [
            socket.create_connection(("127.0.0.1", other.port), 5, (address, 0))
            for address in ("127.0.0.1", "127.0.0.2")
            for _ in range(40)
        ]
        for connection in opened:
            connection.sendall(request("/v1/completions", body))
        busy = [refused(connection) for connection in opened]
        found = sum(busy[:40]), sum(busy[40:])
        check(15 <= found[0] <= 20 and 25 <= found[1] <= 30, f"of 40 each, {found} were refused")
    return f"of 40 requests each, {found[0]} of the first client and {found[1]} of the second got 503"


def long_text(served: Served) -> str:
    """10 MB of text from a client that disconnects at once, three times; the server must become idle afterwards."""
    text = "once upon a time " * 600_000
    data = request("/api/generate", {"model": served.model, "prompt": text, "stream": False})
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(data)
            time.sleep(1)
    began = time.perf_counter()
    served.quiet()
    return f"at rest {time.perf_counter() - began:.1f} s after the last one left"


SERVER_ATTACKS: tuple[Attack, ...] = (
    *(hosts_and_origins, keys, paths_as_names, local_registry, framing, json_bombs, numbers, grammars, pictures),
    *(templates, connections, one_client, long_text),
)


def tried(name: str, attack: Callable[[], str]) -> tuple[str, str, str]:
    """A row: the attack, whether it was repelled, and what happened."""
    try:
        row = (name, "held", attack())
    except SkippedError as why:
        row = (name, "skipped", str(why))
    except Exception as error:  # show any error, and continue with the next attack
        row = (name, "DEFECT", f"{type(error).__name__}: {error}")
    sys.stderr.write(f"{row[0]}: {row[1]}: {row[2]}\n")
    return row


def main() -> None:
    """Parse the command line, attack, show the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--only", default="", help="attacks whose names contain this")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        stage = Stage(Path(folder), options.models)
        chosen = [attack for attack in SERVER_ATTACKS if options.only in attack.__name__]
        if chosen:
            with stage.serve() as served:
                before = answer_of(served)
                for attack in chosen:

                    def attacked(attack: Attack = attack) -> str:
                        found = attack(served)
                        check(httpx.get(served.url + "/health", timeout=PATIENCE_S).status_code == 200, "no health")
                        check(answer_of(served) == before, "the server answers otherwise than before")
                        return found

                    rows.append(tried(attack.__name__.replace("_", " "), attacked))
        for alone in (*FILE_ATTACKS, *TIME_ATTACKS):
            if options.only in alone.__name__:
                with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as own:
                    stage = Stage(Path(own), options.models)
                    rows.append(tried(alone.__name__.replace("_", " "), partial(alone, stage)))
    table(("attack", "", "what happened"), rows)
    sys.exit(any(row[1] == "DEFECT" for row in rows))


if __name__ == "__main__":
    main()
