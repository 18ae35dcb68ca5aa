"""`localllm serve` beside llama-cpp-python's own server on the same file, 1, 4 and 8 clients streaming at once.

    server_load.py MODEL.gguf TEXT.txt [--clients 1,4,8] [--prompt 600] [--tokens 64] [--rounds 3] [--threads 2]
        [--peer PYTHON]

Both servers run all the time and are asked in turn. In a round each client sends one request to /v1/completions, with a
prompt of its own (`prompt` characters of the text, at another place each time, so that no prefix is known) and greedy
sampling; no answer may end before `tokens` tokens. TTFT runs from sending to the first piece of text; ITL is the mean
time between the tokens after it; tokens a second are all clients' together, from the first request to the last byte.
The figures are medians over all requests, or rounds. `--peer` names an interpreter that has llama-cpp-python with its
server; this one by default.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.engine_tools import table
from benchmarks.servers import Server, llama_cpp, localllm
from gguf_io import load_tokenizer, open_model

STRIDE = 977  # characters between the prompts' beginnings


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds until each client's first text, between its tokens, and for all of them together."""

    ttft: list[float]
    itl: list[float]
    took: float


async def one(client: httpx.AsyncClient, server: Server, prompt: str, tokens: int, ends: Sequence[int]) -> list[float]:
    """When pieces of one answer came, in seconds from sending."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["logit_bias"] = {str(token): -100 for token in ends}
    began, came = time.monotonic(), []
    async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                came.append(time.monotonic() - began)
    if not came:
        raise RuntimeError(f"{server.name} has answered nothing")
    return came


async def play(server: Server, prompts: Sequence[str], tokens: int, ends: Sequence[int]) -> Round:
    """All clients at once."""
    async with httpx.AsyncClient(timeout=None) as client:
        began = time.monotonic()
        came = await asyncio.gather(*(one(client, server, prompt, tokens, ends) for prompt in prompts))
        took = time.monotonic() - began
    between = [(times[-1] - times[0]) / max(tokens - 1, 1) for times in came]
    return Round([times[0] for times in came], between, took)


def measure(servers: Sequence[Server], text: str, arguments: argparse.Namespace, ends: Sequence[int]) -> None:
    """Ask in turn and print a table."""
    at = 0
    rows: list[list[object]] = []
    for clients in (int(count) for count in arguments.clients.split(",")):
        rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
        for number in range(arguments.rounds + 1):
            starts = [(at + STRIDE * index) % (len(text) - arguments.prompt) for index in range(clients)]
            at += STRIDE * clients
            prompts = [text[start : start + arguments.prompt] for start in starts]
            for server in servers:
                done = asyncio.run(play(server, prompts, arguments.tokens, ends))
                if number:  # the first wakes everything up
                    rounds[server.name].append(done)
        rates = {}
        for name, played in rounds.items():
            rates[name] = statistics.median(clients * arguments.tokens / one.took for one in played)
            ttft = [1e3 * value for one in played for value in one.ttft]
            itl = [1e3 * value for one in played for value in one.itl]
            rows.append(
                [clients, name, statistics.median(ttft), max(ttft), statistics.median(itl), max(itl), rates[name]]
            )
        if len(servers) > 1:
            rows[-2].append(rates[servers[0].name] / rates[servers[1].name])
            rows[-1].append("")
    table(["clients", "server", "TTFT ms", "worst", "ITL ms", "worst", "tok/s"] + ["ratio"] * (len(servers) > 1), rows)


def main() -> None:
    """Parse the command line, start the servers, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--clients", default="1,4,8")
    parser.add_argument("--prompt", type=int, default=600, help="characters")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", default=sys.executable, metavar="PYTHON")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    with open_model(arguments.model) as file:
        tokenizer = load_tokenizer(file)
    context = len(tokenizer.encode(text[: arguments.prompt])) * 2 + arguments.tokens
    with (
        localllm(arguments.model, arguments.threads) as ours,
        llama_cpp(arguments.peer, arguments.model, arguments.threads, context) as theirs,
    ):
        measure([ours, theirs], text, arguments, sorted(tokenizer.eog_ids))


if __name__ == "__main__":
    main()
