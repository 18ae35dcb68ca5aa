"""Routes of llama.cpp's server: tokenization, templates, properties, slots, adapters, embeddings and reranking."""

from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter
from pydantic import AliasChoices, Field

from gguf_io.interruption import checkpoint
from localllm.answer.request import AnswerRequest
from localllm.engine.request import SamplingParams
from localllm.server.bodies import (
    AppliedAdapters,
    Body,
    ComputedBody,
    Messages,
    NamedBody,
    Object,
    Tokens,
    Tools,
    keep_alive_s,
    offered_tools,
)
from localllm.server.contents import openai_message
from localllm.server.embeddings import embed_all
from localllm.server.errors import TOO_LONG_LLAMA_CPP, ApiError, Refusal, kind_of, known
from localllm.server.json_body import ProtocolRoute
from localllm.server.limits import MAX_INT, MAX_RERANK_DOCUMENTS
from localllm.server.service import ServiceDep
from localllm.server.streams import interruptible

_KINDS = {401: "authentication_error", 404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}


class LlamaCppRoute(ProtocolRoute):
    """A route of llama.cpp's server."""

    @staticmethod
    def error_body(refusal: Refusal) -> Object:
        kind = "exceed_context_size_error" if refusal.too_long else kind_of(refusal.status, _KINDS)
        message = refusal.worded(TOO_LONG_LLAMA_CPP)
        return {"error": {"code": refusal.status, "message": message, "type": kind, **refusal.counts}}


router = APIRouter(route_class=LlamaCppRoute, tags=["llama.cpp"])


class TokenizeBody(NamedBody):
    """/tokenize. add_special adds BOS and the like; parse_special parses the names of special tokens.

    prompt and add_special_tokens: vLLM's form, in which names of special tokens are always parsed.
    """

    content: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeBody(NamedBody):
    """/detokenize."""

    tokens: Tokens


class TemplateBody(NamedBody):
    """/apply-template."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool = True


class EmbeddingBody(ComputedBody):
    """/embedding. content, or input: one text or several. embd_normalize: only 2, the Euclidean norm."""

    content: Annotated[
        str | Annotated[list[str], Field(fail_fast=True)], Field(validation_alias=AliasChoices("content", "input"))
    ]
    embd_normalize: Literal[2] = 2


class CohereDocument(Body):
    """A document in Cohere's format."""

    text: str


Documents = Annotated[list[str | CohereDocument], Field(fail_fast=True, min_length=1, max_length=MAX_RERANK_DOCUMENTS)]


class RerankBody(ComputedBody):
    """/rerank. texts, return_text: names of Text Embeddings Inference, whose form the answer then has."""

    query: str
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    return_documents: bool = False
    return_text: bool = False


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: ServiceDep) -> Object:
    """Text to token ids."""
    async with service.lease(await service.model_or_only(body.model)) as lease:
        tokenizer = lease.model.tokenizer

        def work() -> Object:
            if body.prompt is not None:
                ids = tokenizer.encode(body.prompt, body.add_special_tokens, True)
                return {"tokens": ids, "count": len(ids)}
            if body.content is None:
                raise ApiError(400, "content: send the text to tokenize")
            ids = tokenizer.encode(body.content, body.add_special, body.parse_special)
            if not body.with_pieces:
                return {"tokens": ids}
            pieces = []
            for token in ids:
                checkpoint()
                pieces.append({"id": token, "piece": _piece(tokenizer.token_bytes(token))})
            return {"tokens": pieces}

        return await interruptible(work)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: ServiceDep) -> Object:
    """Token ids to text, as llama.cpp's server and vLLM name it."""
    async with service.lease(await service.model_or_only(body.model)) as lease:
        text = await to_thread.run_sync(lease.model.tokenizer.decode, body.tokens)
        return {"content": text, "prompt": text}


@router.get("/tokenizer_info")
async def tokenizer_info(service: ServiceDep, model: str = "") -> Object:
    """vLLM's description of the tokenizer, which lm-evaluation-harness reads."""
    async with service.lease(await service.model_or_only(model)) as lease:
        tokenizer = lease.model.tokenizer
        ends = {"bos_token": tokenizer.bos_id, "eos_token": min(tokenizer.eog_ids, default=None)}
        names = {
            name: None if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
            for name, token in ends.items()
        }
        return {**names, "chat_template": lease.model.template.source}


@router.post("/apply-template")
async def apply_template(body: TemplateBody, service: ServiceDep) -> Object:
    """A conversation's prompt."""
    messages = await to_thread.run_sync(lambda: [openai_message(message) for message in body.messages])
    tools = offered_tools(body.tools)
    name = await service.model_or_only(body.model)
    if body.add_generation_prompt:
        prompt = await service.prompt(name, AnswerRequest(messages=messages, tools=tools))
        return {"prompt": known(prompt.text, "the text of a prompt")}
    async with service.lease(name) as lease:
        render = partial(lease.model.template.render, messages, tools=tools or None, add_generation_prompt=False)
        return {"prompt": await to_thread.run_sync(render)}


@router.get("/props")
async def props(service: ServiceDep, model: str = "") -> Object:
    """A model's properties: template, context, defaults. Loads it if it is not in memory."""
    name = await service.model_or_only(model)
    async with service.lease(name) as lease:
        held, resident = lease.model, await service.models.resident()
        context = next((one.context for one in resident if one.about.name == lease.name), 0)
        models, entry = await service.find(name)
        capabilities = await to_thread.run_sync(models.capabilities, entry)
        tokenizer = held.tokenizer

        def text_of(token: int | None) -> str:
            return "" if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")

        return {
            "default_generation_settings": {"n_ctx": context, "params": asdict(SamplingParams()) | {"logit_bias": []}},
            "total_slots": held.most_choices,
            "model_alias": name,
            "modalities": {"vision": "vision" in capabilities, "audio": "audio" in capabilities},
            "chat_template": held.template.source,
            "bos_token": text_of(tokenizer.bos_id),
            "eos_token": text_of(min(tokenizer.eog_ids, default=None)),
            "build_info": f"localllm {version('localllm')}",
            "is_sleeping": False,
        }


@router.get("/slots")
async def slots(service: ServiceDep) -> list[Object]:
    """The places for answers of the models in memory, and how many are taken."""
    loaded = service.models.loaded()
    found: list[Object] = []
    for resident in await service.models.resident():
        name = resident.about.name
        running = loaded[name].engine.stats().running if name in loaded else 0
        for index in range(max(running, 1)):
            about = {"id": len(found), "model": name, "n_ctx": resident.context, "is_processing": index < running}
            found.append(about)
    return found


@router.get("/lora-adapters")
async def lora_adapters(service: ServiceDep, model: str = "") -> list[Object]:
    """A model's LoRA adapters: numbers, names of files, weights for requests that choose none."""
    models, entry = await service.find(await service.model_or_only(model))
    found = enumerate(await to_thread.run_sync(models.adapters, entry))
    return [{"id": number, "path": path.name, "scale": scale} for number, (path, scale) in found]


@router.post("/lora-adapters")
async def weigh_adapters(body: AppliedAdapters, service: ServiceDep, model: str = "") -> Object:
    """Change the weights for requests that choose no adapters; those that the list leaves out get 0."""
    models, entry = await service.find(await service.model_or_only(model))
    await to_thread.run_sync(models.set_adapters, entry, [(one.id, one.scale) for one in body])
    return {"success": True}


@router.post("/props")
@router.post("/slots/{slot}")
async def unchangeable() -> None:
    """What llama-server changes while it runs and this server does not. Raises ApiError 501."""
    raise ApiError(501, "properties and slots are not changed by requests: prefixes are kept on disk by themselves")


@router.post("/embedding")
async def embedding(body: EmbeddingBody, service: ServiceDep) -> list[Object]:
    """Vectors of texts, in llama-server's own form."""
    texts = [body.content] if isinstance(body.content, str) else body.content
    name = await service.model_or_only(body.model)
    async with service.lease_embedder(name, keep_alive_s(body.keep_alive)) as lease:
        rows, _ = await embed_all(lease.model, texts, truncate=body.truncate, dimensions=None)
    return [{"index": index, "embedding": [row.tolist()]} for index, row in enumerate(rows)]


@router.post("/v1/rerank")
@router.post("/v1/reranking")
@router.post("/rerank")
@router.post("/reranking")
async def rerank(body: RerankBody, service: ServiceDep) -> Object | list[Object]:
    """Rank documents for a query, best first, in Jina's and Cohere's format, or that of Text Embeddings Inference."""
    body.model = await service.model_or_only(body.model)
    given = body.texts if body.documents is None else body.documents
    if given is None:
        raise ApiError(400, "documents is missing; send a list of texts")
    documents = [document if isinstance(document, str) else document.text for document in given]
    models, entry = await service.find(body.model)
    if not await to_thread.run_sync(models.ranks, entry):  # before anything is loaded
        raise ApiError(
            400,
            f'"{entry.name}" is not a reranker: its file has no classification head. Pull one, such as a '
            "Qwen3-Reranker or jina-reranker in GGUF.",
        )
    async with service.lease_embedder(body.model, keep_alive_s(body.keep_alive)) as lease:
        work = partial(lease.model.rank, body.query, documents, truncate=body.truncate)
        scores, tokens = await interruptible(work)
    best = sorted(range(len(documents)), key=lambda index: -scores[index])[: body.top_n]
    if body.documents is None:
        texts = [{"text": documents[index]} if body.return_text else {} for index in best]
        return [
            {"index": index, "score": float(scores[index]), **text} for index, text in zip(best, texts, strict=True)
        ]
    return {
        "model": body.model,
        "object": "list",
        "results": [
            {
                "index": index,
                "relevance_score": float(scores[index]),
                **({"document": {"text": documents[index]}} if body.return_documents else {}),
            }
            for index in best
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _piece(data: bytes) -> str | list[int]:
    """The token's text, or its bytes if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
