"""The server that the settings name: finds it, sends requests to it, and starts it temporarily."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_io.system import OWN_SESSION, end_within, ending_in_order, open_own
from localllm.errors import RequestError
from localllm.settings import PREFIX, load_settings, read_key

if TYPE_CHECKING:
    import httpx2

TIMEOUT_S = 60.0
LOAD_S = 3600.0  # long enough for a slow disk and for compiling kernels
START_S = 60.0
END_S = 60.0  # longer than the server waits for running requests when it stops
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server's address, whether it runs or not. key: an API key that it accepts, None for none.

    hint: what to do if no server runs there.
    """

    url: str
    port: int
    key: str | None = None
    hint: str = "Start one with `localllm serve`"

    def send(
        self, method: str, path: str, body: object | None = None, timeout_s: float = TIMEOUT_S
    ) -> "httpx2.Response":
        """Send a request, never through a proxy. Raises httpx2.HTTPError or httpx2.InvalidURL."""
        import httpx2

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        url = f"{self.url}{path}"
        return httpx2.request(method, url, json=body, headers=headers, timeout=timeout_s, trust_env=False)

    def ask(self, method: str, path: str, body: object | None = None, timeout_s: float = TIMEOUT_S) -> Any:
        """Send a request and return the JSON response. Raises RequestError if no server runs there or it refuses."""
        import httpx2

        try:
            response = self.send(method, path, body, timeout_s)
        except httpx2.TransportError as error:
            raise RequestError(f"No server runs at {self.url}. {self.hint}.") from error
        try:
            content = response.json()
        except ValueError as error:
            raise RequestError(f"{self.url} does not speak localllm's or Ollama's protocol.") from error
        if response.status_code != 200:
            raise RequestError(f"{self.url} refuses: {content.get('error', response.reason_phrase)}")
        return content

    def runs(self) -> bool:
        """Whether localllm runs there. Raises RequestError if another program does."""
        import httpx2

        try:
            about = httpx2.get(f"{self.url}/api/version", timeout=TIMEOUT_S, trust_env=False)
        except httpx2.TransportError:
            return False
        with contextlib.suppress(ValueError, AttributeError):
            if about.json().get("localllm"):
                return True
        raise RequestError(f"Another program answers at {self.url}, perhaps Ollama. Choose another port with --port.")


def local_server(given: int | None = None) -> LocalServer:
    """The server that the settings name. given: a port that overrides theirs."""
    from localllm.remote.connection import Endpoint, reachable
    from localllm.server.options import server_options, with_ollama_variables

    address = os.environ.get("OLLAMA_HOST", "")
    if "https://" in address.lower() and given is None and f"{PREFIX}HOST" not in os.environ:
        return server_of(address)  # behind a proxy, since no server here speaks TLS itself
    options = server_options(load_settings({"port": given}, with_ollama_variables(os.environ)))
    host, port = reachable(options.settings.host), options.settings.port
    return LocalServer(str(Endpoint(False, host, port, "")), port, options.api_key)


def server_of(host: str | None) -> LocalServer:
    """The localllm or Ollama server at an address; None selects the one of the settings. Raises RequestError."""
    if host is None:
        return local_server()
    from localllm.remote.connection import Endpoint
    from localllm.remote.ollama import DEFAULT_PORT
    from localllm.server.options import with_ollama_variables

    settings = load_settings({}, with_ollama_variables(os.environ))
    key = read_key(settings.remote_key, settings.remote_key_file, "remote_key_file")
    url = str(Endpoint.parse(host, path="", port=DEFAULT_PORT))
    return LocalServer(url, DEFAULT_PORT, key, "Check the address")


@contextlib.contextmanager
def started(server: LocalServer, model: str, ctx: int | None, log: Path) -> Iterator[None]:
    """Run a server for one model until the block exits. log: the file for its output.

    It runs in its own session, so that Ctrl-C reaches only the foreground program. It ends with this process, too, if
    that gets SIGTERM or its terminal is closed. Raises RequestError if it does not start. Call it on the main thread.
    """
    command = [sys.executable, "-m", "localllm", "serve", "--model", model, "--port", str(server.port)]
    command += ["--keep-alive", "-1", *(["--ctx", str(ctx)] if ctx else [])]
    log.unlink(missing_ok=True)
    with ending_in_order():
        with os.fdopen(open_own(log, new=True), "wb") as messages:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, **OWN_SESSION
            )
        try:
            due = time.monotonic() + START_S
            while not server.runs():
                if process.poll() is not None or time.monotonic() > due:
                    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
                        "it said nothing"
                    ]
                    raise RequestError(f"The server does not start: {lines[-1].removeprefix('error: ')}")
                time.sleep(_POLL_S)
            yield
        finally:
            with contextlib.suppress(KeyboardInterrupt):  # a further Ctrl-C does not wait: it ends by itself
                end_within(END_S, process)
