"""Models that are loaded and unloaded while a server is under load, with clients that wait or disconnect."""

import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx

PATIENCE_S = 60
PROMPT = "Once upon a time there was a"
# keep_alive values: forever, for a moment, and unload at once.
KEPT = (-1, 0.5, 0)


class ComingModels:
    """Models besides the one that the other clients use, and the answer of each on an idle server."""

    def __init__(self, url: str, models: list[Path]) -> None:
        self.names = [path.name.removesuffix(".gguf") for path in models]
        self.wrong: list[str] = []
        self._url = url
        with httpx.Client(base_url=url, timeout=None) as client:
            self._expected = {name: self._answer(client, name, -1) for name in self.names}
        self.unload()

    def ask(self, client: httpx.Client, dice: random.Random) -> None:
        """Load a model if needed; its answer must be the same as before."""
        name = dice.choice(self.names)
        found = self._answer(client, name, dice.choice(KEPT))
        if found != self._expected[name]:
            self.wrong.append(f"{name}: {found!r:.300}")

    def leave_a_load(self, client: httpx.Client, dice: random.Random) -> None:
        """Disconnect while a model loads, or just after."""
        body = {"model": dice.choice(self.names), "prompt": PROMPT, "progress": True, "keep_alive": dice.choice(KEPT)}
        with contextlib.suppress(httpx.TimeoutException):
            client.post("/api/generate", json=body, timeout=dice.random() * 0.3 + 0.01)

    def let_go(self, client: httpx.Client, dice: random.Random) -> None:
        """Unload a model as soon as it is idle."""
        self._let_go(client, dice.choice(self.names))

    def unload(self) -> None:
        """Unload all of them, and wait until they are unloaded."""
        deadline = time.monotonic() + PATIENCE_S
        with httpx.Client(base_url=self._url, timeout=None) as client:
            for name in self.names:
                self._let_go(client, name)
            while {model["name"] for model in client.get("/api/ps").json()["models"]} & set(self.names):
                if time.monotonic() > deadline:
                    self.wrong.append(f"models are still there after {PATIENCE_S} s")
                    return
                time.sleep(0.1)

    def _let_go(self, client: httpx.Client, name: str) -> None:
        answer = client.post("/api/generate", json={"model": name, "keep_alive": 0}).json()
        if answer.get("done_reason") != "unload":
            self.wrong.append(f"unload {name}: {answer!r:.300}")

    def _answer(self, client: httpx.Client, name: str, keep_alive: float) -> Any:
        options = {"temperature": 0, "num_predict": 16}
        body = {"model": name, "prompt": PROMPT, "raw": True, "options": options, "keep_alive": keep_alive}
        lines = client.post("/api/generate", json=body).text.splitlines()
        last = json.loads(lines[-1])
        return last.get("error") or "".join(json.loads(line)["response"] for line in lines)
