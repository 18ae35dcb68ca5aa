"""Ollama's registry protocol: GET /v2/<repository>/manifests/<tag>, GET /v2/<repository>/blobs/<digest>.

It is Docker's, with Ollama's media types. Registries that require a login are refused: the address of the token server
is chosen by the registry, so nothing is sent there.
"""

import httpx2

from localllm.library.errors import PullError
from localllm.library.manifest import KINDS, MAX_MANIFEST_BYTES, MEDIA_TYPE, blob_name, parse_manifest
from localllm.library.names import ModelName
from localllm.library.plan import PullPlan, RemoteFile
from localllm.library.web import Remote, get_small

_LOOPBACK = ("localhost", "127.0.0.1")


def base_address(name: ModelName, insecure: bool = False) -> str:
    """The address of a model's repository. insecure: without TLS, as registries on this machine always are."""
    is_plain = insecure or name.host.partition(":")[0] in _LOOPBACK
    return f"{'http' if is_plain else 'https'}://{name.host}/v2/{name.repository}"


def plan(client: httpx2.Client, name: ModelName) -> PullPlan:
    """Fetch a model's manifest. Raises PullError, and LibraryError for an invalid manifest."""
    base = base_address(name)
    url = f"{base}/manifests/{name.tag}"
    data = get_small(client, Remote(url), {"Accept": MEDIA_TYPE}, str(name), MAX_MANIFEST_BYTES)
    manifest = parse_manifest(data, url, "Check the model's name; a proxy may have answered instead of the registry.")
    if not manifest.of_kind("model"):
        raise PullError(f"{name} has no GGUF file in its manifest. Choose another model or tag.")
    return PullPlan(
        name,
        tuple(
            RemoteFile(
                kind=layer.kind,
                remote=Remote(f"{base}/blobs/{layer.digest}"),
                size=layer.size,
                what=f"{name}'s {layer.kind}",
                key=blob_name(layer.digest),
                digest=layer.digest,
            )
            for layer in manifest.layers
            if layer.kind in KINDS
        ),
    )
