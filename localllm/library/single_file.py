"""One GGUF file at any address. Its digest is not known beforehand, so only its length and content are checked."""

import hashlib
import time

import httpx2

from localllm.library.errors import PullError
from localllm.library.manifest import MAX_LAYER_BYTES
from localllm.library.names import ModelName
from localllm.library.plan import PullPlan, RemoteFile
from localllm.library.web import Remote, check_status, get, length_of, persistently


def plan(client: httpx2.Client, url: str, name: ModelName) -> PullPlan:
    """Request the file's length. Raises PullError if the host does not give it."""

    def ask() -> tuple[int, str]:
        with get(client, Remote(url), {"Range": "bytes=0-0"}) as response:
            check_status(response, url)
            total = length_of(response)
            if total is None or not 0 < total <= MAX_LAYER_BYTES:
                raise PullError(f"{response.url.host} does not say how long {url} is, so it cannot be checked.")
            # A weak ETag may stay the same while bytes change (RFC 9110, 8.8.1).
            etag = response.headers.get("etag", "")
            return total, "" if etag.startswith("W/") else etag

    size, etag = persistently(ask, time.sleep)
    key = f"url-{hashlib.sha256(url.encode()).hexdigest()}"
    return PullPlan(name, (RemoteFile("model", Remote(url, etag=etag), size, url, key, None),))
