"""Mixed load on a real server for minutes: answers must stay correct, and nothing may leak.

    soak.py MODEL.gguf [OTHER.gguf ...] [--minutes 10] [--clients 8] [--warm 1] [--every 30] [--threads 1]
            [--kv-mib 16]

Clients generate, chat, embed (if llama.cpp is installed), tokenise, use formats and request several choices; they
disconnect while queued, during prefill and while answered; some read slowly, some send half a request and some
nonsense. Other models are loaded, used, unloaded and abandoned while they load; at most three are in memory at once.
Deterministic answers are compared with those from before the load. Memory, descriptors, threads and tasks are shown
over time. The exit status is 1 if an answer was wrong, if a request, page or descriptor is left when the server is
idle, or if memory grew by more than 5 % from the first to the last third of the time after the first --warm minutes, in
which the KV cache should have filled.
"""

import argparse
import contextlib
import json
import random
import re
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.engine_tools import table
from benchmarks.servers import Server, localllm
from benchmarks.soak_models import ComingModels

MIB = 2**20
GROWTH = 1.05
QUIET_S = 30
PAGE_TOKENS = 16
TEXT = "Once upon a time there was a little girl named Lily who liked to play in the park"
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Tom", "Lily"]}}, "required": ["name"]}
NONSENSE: tuple[tuple[str, bytes], ...] = (
    ("/api/generate", b"{"),
    ("/api/chat", b'{"model": "MODEL", "messages": [{"role": "wizard", "content": "x"}]}'),
    ("/api/generate", b'{"model": "MODEL", "prompt": "x", "options": {"top_k": "many"}}'),
    ("/api/generate", b'{"model": "MODEL", "prompt": "x", "format": {"not": {}}}'),
    ("/v1/completions", b'{"model": "../../etc/passwd", "prompt": "x"}'),
    ("/tokenize", b'{"model": "nobody", "content": "x"}'),
    ("/v1/chat/completions", b'{"model": "MODEL", "n": 1000, "messages": [{"role": "user", "content": "x"}]}'),
)


class Load:
    """The clients' actions, the expected answers, and what went wrong."""

    def __init__(self, server: Server, others: list[Path]) -> None:
        self.server = server
        self.others = ComingModels(server.url, others) if others else None
        self.stop = threading.Event()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.embeds = True
        self._expected: dict[str, Any] = {}
        with httpx.Client(base_url=server.url, timeout=None) as client:
            self.embeds = client.post("/api/embed", json=self._embed(0)).status_code == httpx.codes.OK
            for kind, number in ((kind, number) for kind in self._checked() for number in range(4)):
                self._expected[f"{kind} {number}"] = self._answer(client, kind, number)

    def work(self, number: int) -> None:
        """Run one client until `stop` is set."""
        dice = random.Random(number)
        kinds: list[Callable[[httpx.Client, random.Random], None]] = [
            *([self._check] * 6), self._leave_a_stream, self._leave_early, self._read_slowly, self._say_half,
            self._say_nonsense, self._leave_choices, self._ask_for_something_new,
        ]  # fmt: skip
        if self.others:
            kinds += [self.others.ask, self.others.ask, self.others.leave_a_load, self.others.let_go]
        with httpx.Client(base_url=self.server.url, timeout=120) as client:
            while not self.stop.is_set():
                kind = dice.choice(kinds)
                try:
                    kind(client, dice)
                    self.done[kind.__name__.strip("_")] += 1
                except httpx.HTTPError as error:
                    self.wrong.append(f"{kind.__name__}: {error!r}")

    def _checked(self) -> list[str]:
        return ["generate", "chat", "seeded", "tokenise", "format", *(["embed"] if self.embeds else [])]

    def _check(self, client: httpx.Client, dice: random.Random) -> None:
        """Check that a deterministic answer is the same as before the load."""
        kind, number = dice.choice(self._checked()), dice.randrange(4)
        found = self._answer(client, kind, number)
        if found != self._expected[f"{kind} {number}"]:
            self.wrong.append(f"{kind} {number}: {found!r:.300}")

    def _answer(self, client: httpx.Client, kind: str, number: int) -> Any:
        model, prompt = self.server.model, TEXT[: 20 + 15 * number]
        if kind == "tokenise":
            tokens = client.post("/tokenize", json={"model": model, "content": prompt}).json()["tokens"]
            text = client.post("/detokenize", json={"model": model, "tokens": tokens}).json()["content"]
            return tokens, text
        if kind == "embed":
            return client.post("/api/embed", json=self._embed(number)).json()["embeddings"]
        if kind == "chat":
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
            body |= {"max_tokens": 30, "stream": True}
            lines = client.post("/v1/chat/completions", json=body).text.splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        options = {"num_predict": 40, **({"seed": number} if kind in ("seeded", "format") else {"temperature": 0})}
        body = {"model": model, "prompt": prompt, "raw": True, "stream": False, "options": options}
        if kind == "format":
            body["format"] = SCHEMA
        return client.post("/api/generate", json=body).json()["response"]

    def _embed(self, number: int) -> dict[str, Any]:
        return {"model": self.server.model, "input": [TEXT[: 10 + number], TEXT]}

    def _leave_a_stream(self, client: httpx.Client, dice: random.Random) -> None:
        body = {"model": self.server.model, "prompt": f"{dice.random()}", "options": {"num_predict": 400}}
        with client.stream("POST", "/api/generate", json=body) as answer:
            for count, _ in enumerate(answer.iter_lines()):
                if count > dice.randint(0, 40):
                    break

    def _leave_early(self, client: httpx.Client, dice: random.Random) -> None:
        """Disconnect in the queue or during prefill, streamed or not."""
        body = {"model": self.server.model, "prompt": f"{dice.random()} " * 40, "stream": dice.random() < 0.5}
        with contextlib.suppress(httpx.TimeoutException):
            client.post("/api/generate", json=body, timeout=dice.random() * 0.2 + 0.005)

    def _leave_choices(self, client: httpx.Client, dice: random.Random) -> None:
        body = {"model": self.server.model, "messages": [{"role": "user", "content": f"{dice.random()}"}], "n": 3}
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())

    def _ask_for_something_new(self, client: httpx.Client, dice: random.Random) -> None:
        body = {"model": self.server.model, "prompt": f"{dice.random()} " * dice.randint(1, 20), "max_tokens": 30}
        client.post("/v1/completions", json=body)

    def _say_nonsense(self, client: httpx.Client, dice: random.Random) -> None:
        path, body = dice.choice(NONSENSE)
        status = client.post(path, content=body.replace(b"MODEL", self.server.model.encode())).status_code
        if not httpx.codes.is_client_error(status):
            self.wrong.append(f"{path} {body!r}: {status}")

    def _read_slowly(self, _client: httpx.Client, dice: random.Random) -> None:
        body = {"model": self.server.model, "prompt": "Once", "logprobs": True, "top_logprobs": 20}
        body["options"] = {"num_predict": 400}
        with self._connect() as connection:
            connection.sendall(_request("/api/generate", json.dumps(body).encode()))
            for _ in range(dice.randint(1, 10)):
                connection.recv(256)
                time.sleep(0.1)

    def _say_half(self, _client: httpx.Client, dice: random.Random) -> None:
        whole = _request("/api/generate", b'{"model": "x", "prompt": "y"}')
        with self._connect() as connection:
            connection.sendall(whole[: dice.randint(1, len(whole) - 1)])
            time.sleep(dice.random())

    def _connect(self) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(self.server.url.rpartition(":")[2])))
        return connection


class Watch:
    """A server's figures over time."""

    COLUMNS = ("minute", "RSS MiB", "descriptors", "threads", "children", "tasks", "pages used", "running", "waiting")

    def __init__(self, server: Server) -> None:
        self._server = server
        self._process = psutil.Process(server.process.pid)
        self._began = time.monotonic()
        self.rows: list[list[Any]] = []

    def look(self) -> dict[str, Any]:
        """Record the current figures."""
        metrics = httpx.get(f"{self._server.url}/metrics", timeout=60).text

        def of(name: str) -> int:
            return round(
                sum(float(value) for value in re.findall(rf"^localllm_{name}(?:{{.*}})? (\S+)$", metrics, re.M))
            )

        children = self._process.children(recursive=True)
        resident = sum(process.memory_info().rss for process in (self._process, *children))
        found = [
            (time.monotonic() - self._began) / 60, resident / MIB, self._process.num_fds(),
            self._process.num_threads(), len(children), of("tasks"), of("kv_pages") - of("kv_pages_free"),
            of("running_requests"), of("waiting_requests"),
        ]  # fmt: skip
        self.rows.append(found)
        cached = {"cached tokens": of("cached_tokens"), "prefixes": of("cached_prefixes")}
        return {**dict(zip(self.COLUMNS, found, strict=True)), **cached}

    def memory_since(self, first: int) -> tuple[float, float]:
        """The mean MiB in the first and in the last third of the rows from `first` on."""
        found = [row[self.COLUMNS.index("RSS MiB")] for row in self.rows[first:]]
        third = max(len(found) // 3, 1)
        return statistics.mean(found[:third]), statistics.mean(found[-third:])


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def quiet(watch: Watch, idle: dict[str, Any]) -> dict[str, Any]:
    """Wait up to QUIET_S until nothing runs and no extra descriptor is open; return the figures then."""
    deadline = time.monotonic() + QUIET_S
    while True:
        found = watch.look()
        watch.rows.pop()
        busy = found["running"] or found["waiting"] or found["descriptors"] > idle["descriptors"]
        if not busy or time.monotonic() > deadline:
            watch.look()
            return found
        time.sleep(0.5)


def complaints(load: Load, idle: dict[str, Any], early: float, late: float, end: dict[str, Any]) -> list[str]:
    """Everything that went wrong. early, late: MiB of memory."""
    wrong = [*load.wrong, *(load.others.wrong if load.others else [])]
    found = [f"{len(wrong)} wrong answers, the first: {wrong[0]}"] if wrong else []
    found += [f"{end[name]} are {name} when all is quiet" for name in ("running", "waiting") if end[name]]
    found += [
        f"{end[name]} {name}, and {idle[name]} before the load"
        for name in ("descriptors", "tasks")
        if end[name] > idle[name]
    ]
    # A prefix's last page may be partly filled, and it has its own copy of the page where it diverges from another.
    explained = end["cached tokens"] // PAGE_TOKENS + 2 * end["prefixes"]
    if end["pages used"] > explained:
        found.append(f"{end['pages used']} pages are used, and cached prefixes explain {explained}")
    if late > GROWTH * early:
        found.append(f"memory grew from {early:.0f} to {late:.0f} MiB")
    return found


def main() -> None:
    """Parse the command line, load the server, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("others", type=Path, nargs="*")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--warm", type=float, default=1, help="minutes")
    parser.add_argument("--every", type=float, default=30, help="seconds between figures")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-mib", type=int, default=16)
    arguments = parser.parse_args()
    with localllm(arguments.model, arguments.threads, arguments.kv_mib, arguments.others) as server:
        load, watch = Load(server, arguments.others), Watch(server)
        idle = watch.look()
        clients = [threading.Thread(target=load.work, args=(number,)) for number in range(arguments.clients)]
        for client in clients:
            client.start()
        time.sleep(60 * arguments.warm)
        warm = len(watch.rows)
        hot = watch.look()
        while hot["minute"] < arguments.minutes:
            time.sleep(min(arguments.every, max(60 * (arguments.minutes - hot["minute"]), 0.1)))
            hot = watch.look()
        load.stop.set()
        for client in clients:
            client.join()
        early, late = watch.memory_since(warm)
        if load.others:
            load.others.unload()
        end = quiet(watch, idle)
        table(watch.COLUMNS, watch.rows)
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(load.done.items()))
        sys.stdout.write(
            f"{sum(load.done.values())} requests: {done}.\n{end['cached tokens']} tokens are cached. "
            f"Memory: {early:.0f} MiB in the first third after warming up, {late:.0f} in the last.\n"
        )
        if found := complaints(load, idle, early, late, end):
            sys.exit("\n".join(found))
        sys.stdout.write("Nothing wrong, nothing left behind.\n")


if __name__ == "__main__":
    main()
