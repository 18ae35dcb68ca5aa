"""The application: routes, errors in the words of their protocol, models that end with it."""

import contextlib
import logging
from collections.abc import AsyncIterator
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from localllm.engine.loaded_model import LoadedModel
from localllm.errors import ContextOverflowError, LocalLLMError, QueueFullError
from localllm.server import anthropic, docs, health, native, rerank
from localllm.server.catalog import Catalog
from localllm.server.counting import Counting
from localllm.server.errors import error_body, status_of
from localllm.server.front.catalog import ForeignCatalog
from localllm.server.json_body import what_is_wrong
from localllm.server.metrics import Metrics
from localllm.server.models_manager import Loader, ModelManager
from localllm.server.ollama import embed, generate, library, models
from localllm.server.openai import chat, completions, responses
from localllm.server.openai import models as openai_models
from localllm.server.options import ServerOptions
from localllm.server.responses import defect
from localllm.server.security import Gate
from localllm.server.service import Service

log = logging.getLogger(__name__)

RETRY_AFTER = {"Retry-After": "1"}


def create_app(options: ServerOptions, catalog: Catalog | ForeignCatalog, load: Loader) -> FastAPI:
    """Make the application. load is called on other threads."""
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        manager = ModelManager(options, load)
        metrics.watch(
            lambda: {
                slot.entry.name: slot.model.engine.stats()
                for slot in manager.slots()
                if isinstance(slot.model, LoadedModel)
            }
        )
        app.state.service = Service(options, catalog, manager, metrics)
        yield
        await manager.close()

    app = FastAPI(title="localllm", version=version("localllm"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Counting, metrics=metrics)
    app.add_middleware(Gate, options=options)
    app.add_exception_handler(LocalLLMError, _show_error)
    app.add_exception_handler(RequestValidationError, _show_invalid)
    app.add_exception_handler(HTTPException, _show_http_error)
    app.add_exception_handler(Exception, _show_defect)
    for routes in (
        models,
        generate,
        embed,
        chat,
        completions,
        openai_models,
        responses,
        anthropic,
        rerank,
        native,
        health,
        docs,
    ):
        app.include_router(routes.router)
    app.include_router(library.router)
    app.include_router(library.json_router)
    return app


def _body(request: Request, status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error_body(request.url.path, status, message), status, headers)


async def _show_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LocalLLMError)
    headers = RETRY_AFTER if isinstance(error, QueueFullError) else None
    code = "context_length_exceeded" if isinstance(error, ContextOverflowError) else None
    return JSONResponse(error_body(request.url.path, status_of(error), str(error), code), status_of(error), headers)


async def _show_invalid(request: Request, error: Exception) -> JSONResponse:
    """A body of the wrong shape."""
    assert isinstance(error, RequestValidationError)
    return _body(request, 400, what_is_wrong(error.errors(), error.body))


async def _show_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _body(request, error.status_code, str(error.detail), dict(error.headers or {}))


async def _show_defect(request: Request, error: Exception) -> JSONResponse:
    return _body(request, 500, defect(error))
