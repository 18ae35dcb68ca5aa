"""The error format of llama-server's routes."""

from localllm.server.bodies import Object
from localllm.server.errors import kind_of
from localllm.server.json_body import ProtocolRoute

_KINDS = {401: "authentication_error", 404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}


class LlamaCppRoute(ProtocolRoute):
    """A route of llama.cpp's server."""

    @staticmethod
    def error_body(status: int, message: str, _code: str | None = None) -> Object:
        return {"error": {"code": status, "message": message, "type": kind_of(status, _KINDS)}}
