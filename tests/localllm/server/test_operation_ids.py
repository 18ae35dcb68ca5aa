"""Our own OpenAPI, made without a server."""

import warnings
from typing import Any, cast

from localllm.server.app import create_app
from localllm.server.options import ServerOptions


def test_operation_ids_are_unique_and_every_route_says_what_it_does() -> None:
    nothing: Any = cast("Any", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        described = create_app(ServerOptions(), nothing, nothing).openapi()
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) and len(ids) > 30
    assert all(operation.get("description") for operation in operations)
