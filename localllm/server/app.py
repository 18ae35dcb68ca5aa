"""The ASGI application: routes, middleware, and error handlers that write each protocol's own errors."""

import contextlib
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from itertools import takewhile

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from localllm.errors import LocalLLMError, QueueFullError
from localllm.server import operation, page
from localllm.server.anthropic import messages
from localllm.server.anthropic import models as anthropic_models
from localllm.server.chats import routes as chats
from localllm.server.errors import RETRY_AFTER, ErrorBody, Refusal, refusal_of
from localllm.server.json_body import ProtocolRoute, what_is_wrong
from localllm.server.llama_cpp import completion as llama_cpp_completion
from localllm.server.llama_cpp import routes as llama_cpp
from localllm.server.metrics import Counting, Metrics
from localllm.server.ollama import generate, library
from localllm.server.ollama import models as ollama_models
from localllm.server.openai import chat, completions, conversations, responses
from localllm.server.openai import models as openai_models
from localllm.server.openai.stored import Stored
from localllm.server.options import ServerOptions
from localllm.server.refusals import REASON, RefusalLog
from localllm.server.security import Gate
from localllm.server.semantic import SemanticCache
from localllm.server.served import ServedModels
from localllm.server.service import Service
from localllm.server.streams import defect

_PROTOCOLS = (
    ollama_models,
    generate,
    library,
    chat,
    completions,
    anthropic_models,  # before OpenAI's: its routes take only requests of Anthropic's clients
    openai_models,
    responses,
    conversations,
    messages,
    llama_cpp,
    llama_cpp_completion,
    chats,
)


def create_app(options: ServerOptions, models: Callable[[], ServedModels]) -> FastAPI:
    """Create the application. models: creates the served models; called on the event loop."""
    metrics = Metrics(options.slo)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        served = models()
        metrics.watch(lambda: {name: model.engine.stats() for name, model in served.loaded().items()})
        semantic = SemanticCache(options.settings) if options.settings.semantic_cache else None
        app.state.service = Service(options, served, metrics, semantic)
        app.state.stored = Stored()
        app.state.chats = chats.AllChats(app.state.service)
        yield
        await app.state.chats.close()
        await served.close()
        if semantic is not None:
            semantic.close()

    app = FastAPI(title="localllm", version=version("localllm"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, options=options, error_body_at=error_body_at)
    app.add_middleware(Counting, metrics=metrics)
    app.add_middleware(RefusalLog)
    for kind in (LocalLLMError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _show_error)
    # The page before the text at / for other clients; routes are tried in order, so the busiest ones come first.
    for module in dict.fromkeys((chat, messages, responses, generate, page, *_PROTOCOLS, operation)):
        app.include_router(module.router)
    return app


def error_body_at(path: str) -> ErrorBody:
    """The error format for a path that matches no route: that of the route with the longest common prefix."""
    modules = [module for module in _PROTOCOLS if module is not anthropic_models]
    routes = [route for module in modules for route in module.router.routes if isinstance(route, ProtocolRoute)]
    steps = path.split("/")

    def common(route: ProtocolRoute) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(route.path.split("/"), steps)))  # noqa: B905

    return max(routes, key=common).error_body


async def _show_error(request: Request, error: Exception) -> JSONResponse:
    """The response for an exception, in the format of the route's protocol."""
    refusal = Refusal(500, defect(error))
    headers: dict[str, str] = {}
    if isinstance(error, LocalLLMError):
        refusal = refusal_of(error)
        headers = RETRY_AFTER if isinstance(error, QueueFullError) else {}
    elif isinstance(error, RequestValidationError):
        refusal = Refusal(400, what_is_wrong(error.errors(), error.body))
    elif isinstance(error, HTTPException):
        refusal, headers = Refusal(error.status_code, str(error.detail)), dict(error.headers or {})
    request.scope[REASON] = refusal.message
    route = request.scope.get("route")
    write = route.error_body if isinstance(route, ProtocolRoute) else error_body_at(request.url.path)
    return JSONResponse(write(refusal), refusal.status, headers)
