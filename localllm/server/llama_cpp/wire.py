"""What all routes of llama-server's share: errors, and the model where a request names none."""

from anyio import to_thread

from localllm.library.names import BUILT_IN
from localllm.server.bodies import Object
from localllm.server.errors import ApiError, kind_of
from localllm.server.json_body import ProtocolRoute
from localllm.server.service import Service

_KINDS = {401: "authentication_error", 404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}


class LlamaCppRoute(ProtocolRoute):
    """A route of llama.cpp's server."""

    @staticmethod
    def error_body(status: int, message: str, _code: str | None = None) -> Object:
        """An error, as a response or within a stream."""
        return {"error": {"code": status, "message": message, "type": kind_of(status, _KINDS)}}


async def model_or_only(name: str, service: Service) -> str:
    """The name, or the only model's: of those in memory, else of all but the built-in one. Raises ApiError 400."""
    if name:
        return name
    resident = [one.about.name for one in await service.models.resident()]
    listed = [about.name for _, about in await to_thread.run_sync(service.listed)]
    names = resident or [name for name in listed if name != BUILT_IN] or listed
    if len(names) != 1:
        raise ApiError(400, f"model is required, since there are {len(names)} of them; GET /v1/models lists them")
    return names[0]
