"""`localllm serve` against a llama.cpp server on the same file, with 1, 4 and 8 clients streaming at once.

    server_load.py MODEL.gguf TEXT.txt [--clients 1,4,8] [--prompt 600] [--tokens 64] [--rounds 3] [--threads 2]
        [--llama-server PROGRAM | --peer PYTHON] [--plain]

All servers run all the time and are measured in turn, a second apart. In a round each client sends one request to
/v1/completions, with a prompt of its own (--prompt characters from a new place in the text, so that no prefix is
cached) and greedy sampling; no answer may end before --tokens tokens. TTFT is from sending to the first piece of text;
ITL is the mean time between the tokens after it; tokens per second are of all clients together, from the first request
to the last byte. The figures are medians over all requests, or rounds. The peer is llama.cpp's own llama-server if
--llama-server names the program, else llama-cpp-python's server run by the interpreter that --peer names, by default
this one. With --plain a second `localllm serve` without speculation is measured too: models with random weights repeat
themselves, which prompt lookup predicts.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.engine_tools import SETTLED_S, table
from benchmarks.servers import Server, llama_cpp, llama_server, localllm
from gguf_io import load_tokenizer, open_model

STRIDE = 977  # characters between the prompts' beginnings


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds until each client's first text, between its tokens, and of the whole round."""

    ttft: list[float]
    itl: list[float]
    took: float


async def one(client: httpx.AsyncClient, server: Server, prompt: str, tokens: int, ends: Sequence[int]) -> list[float]:
    """When the pieces of one answer arrived, in seconds from sending."""
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
    """Run all clients at once."""
    async with httpx.AsyncClient(timeout=None) as client:
        began = time.monotonic()
        came = await asyncio.gather(*(one(client, server, prompt, tokens, ends) for prompt in prompts))
        took = time.monotonic() - began
    between = [(times[-1] - times[0]) / max(tokens - 1, 1) for times in came]
    return Round([times[0] for times in came], between, took)


def measure(servers: Sequence[Server], text: str, arguments: argparse.Namespace, ends: Sequence[int]) -> None:
    """Measure the servers in turn and print a table; the last server is the peer of all others."""
    at = 0
    rows: list[list[object]] = []
    for clients in (int(count) for count in arguments.clients.split(",")):
        rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
        for number in range(arguments.rounds + 1):
            starts = [(at + STRIDE * index) % (len(text) - arguments.prompt) for index in range(clients)]
            at += STRIDE * clients
            prompts = [text[start : start + arguments.prompt] for start in starts]
            for server in servers:
                time.sleep(SETTLED_S)
                done = asyncio.run(play(server, prompts, arguments.tokens, ends))
                if number:  # the first is a warm-up
                    rounds[server.name].append(done)
        rates = {
            name: statistics.median(clients * arguments.tokens / one.took for one in played)
            for name, played in rounds.items()
        }
        for name, played in rounds.items():
            ttft = [1e3 * value for one in played for value in one.ttft]
            itl = [1e3 * value for one in played for value in one.itl]
            figures = (statistics.median(ttft), max(ttft), statistics.median(itl), max(itl), rates[name])
            rows.append([clients, name, *figures, rates[name] / rates[servers[-1].name]])
    table(["clients", "server", "TTFT ms", "worst", "ITL ms", "worst", "tok/s", f"times {servers[-1].name}"], rows)


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
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    with open_model(arguments.model) as file:
        tokenizer = load_tokenizer(file)
    context = len(tokenizer.encode(text[: arguments.prompt])) * 2 + arguments.tokens
    threads, most = arguments.threads, max(map(int, arguments.clients.split(",")))
    with contextlib.ExitStack() as stack:
        servers = [localllm(arguments.model, threads)]
        servers += [localllm(arguments.model, threads, speculates=False)] if arguments.plain else []
        if arguments.llama_server:
            servers.append(llama_server(arguments.llama_server, arguments.model, threads, context, most))
        else:
            servers.append(llama_cpp(arguments.peer, arguments.model, threads, context))
        running = [stack.enter_context(server) for server in servers]
        measure(running, text, arguments, sorted(tokenizer.eog_ids))


if __name__ == "__main__":
    main()
