"""Records what a server answers to the requests that localllm sends: python -m tests.fakes.record_engine ADDRESS MODEL.

The server's model must think and call tools (docs/remote.md says how to start it). Prints the recordings as JSON, each
a list of events, or the status and body of a refusal; `engines.json` has them by engine.
"""

import http.client
import json
import os
import sys
from typing import Any

from localllm.answer.request import AnswerRequest
from localllm.remote.connection import Endpoint
from localllm.remote.openai import OpenAIServer
from localllm.settings import Settings

HI = [{"role": "user", "content": "Say hello."}]
COLD: dict[str, Any] = {"sampling": {"temperature": 0}, "max_tokens": 4}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": NUMBER}}
REQUESTS: dict[str, AnswerRequest] = {
    "chat": AnswerRequest(messages=HI, think=False, **COLD),
    "thoughts": AnswerRequest(messages=HI, think=True, **COLD),
    "completion": AnswerRequest(prompt="Once upon a time", **COLD),
    "stopped": AnswerRequest(prompt="1 2 3 4 5 6", stop=("8",), sampling={"temperature": 0}, max_tokens=40),
    "tool": AnswerRequest(
        messages=HI, tools=[WEATHER], tool_choice="weather", think=False, sampling={"temperature": 0}, max_tokens=60
    ),
    "schema": AnswerRequest(messages=HI, format=NUMBER, think=False, sampling={"temperature": 0}, max_tokens=60),
    "grammar": AnswerRequest(messages=HI, grammar=("regex", "(yes|no)"), think=False, **COLD),
    "chat_logprobs": AnswerRequest(messages=HI, think=False, sampling={"temperature": 0, "logprobs": 2}, max_tokens=2),
    "completion_logprobs": AnswerRequest(prompt="Once", sampling={"temperature": 0, "logprobs": 2}, max_tokens=2),
    "too_long": AnswerRequest(prompt="word " * 5000, **COLD),
}


def ask(endpoint: Endpoint, method: str, route: str, body: Any = None, key: str | None = None) -> Any:
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=300)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or endpoint.key}"}
    connection.request(method, endpoint.path + route, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    if response.status != 200:
        return [response.status, json.loads(text)]
    if text.startswith("{"):
        return json.loads(text)
    events = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def main(address: str, model: str) -> None:
    server = OpenAIServer.at(address, Settings(remote_key=os.environ.get("LOCALLLM_REMOTE_KEY")))
    found: dict[str, Any] = {"models": ask(server.endpoint, "GET", "/models")}
    for name, request in REQUESTS.items():
        prompt = server.model(model).prepare(request)
        found[name] = ask(server.endpoint, "POST", prompt.route, dict(prompt.body))
    chat = server.model(model).prepare(REQUESTS["chat"])
    found["wrong_key"] = ask(server.endpoint, "POST", chat.route, dict(chat.body), key="wrong")
    found["wrong_model"] = ask(server.endpoint, "POST", chat.route, dict(chat.body) | {"model": "absent"})
    json.dump(found, sys.stdout, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
