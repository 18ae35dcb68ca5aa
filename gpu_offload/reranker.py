"""How well documents answer a query: models with a classification head, which read both texts together."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gguf_io.model_file import ModelFile
from gguf_io.tokenizer import Tokenizer
from gpu_offload.embedder import PooledTexts
from gpu_offload.errors import LlamaCppError
from gpu_offload.loading import LoadProgress
from gpu_offload.options import LlamaOptions

RANK = 4  # gguf.PoolingType.RANK
_TEMPLATE = "tokenizer.chat_template.rerank"
_PLACES = re.compile(r"\{(query|document)\}")


def is_reranker(model: ModelFile) -> bool:
    """Whether the file says that its states are ranked, or brings the head for it without saying how they are pooled.

    Converters older than the pooling type wrote the head alone.
    """
    pooling = f"{model.architecture}.pooling_type"
    return model.metadata.get_int(pooling, 0) == RANK or (pooling not in model.metadata and _has_head(model))


class LlamaReranker(PooledTexts):
    """A reranker: pairs of query and document in, one score each out; higher is better, the scale is the model's."""

    def __init__(
        self, model: ModelFile, tokenizer: Tokenizer, options: LlamaOptions, progress: LoadProgress | None = None
    ) -> None:
        """Load the model. Raises LlamaCppError and its kin, also for a file without a classification head."""
        if not _has_head(model):
            raise LlamaCppError(
                f"{model.path} has no classification head (cls.weight or cls.output.weight) and cannot score pairs. "
                "Convert the model again with a newer convert_hf_to_gguf.py."
            )
        super().__init__(model, options, RANK, progress)
        self._tokenizer = tokenizer
        self._template = model.metadata.get_str(_TEMPLATE, "")

    def pair(self, query: str, document: str) -> list[int]:
        """Return both texts as the model reads them: by its own template, else BOS query EOS SEP document EOS.

        Of the special tokens those that the vocabulary asks for, as llama.cpp's server does; texts stay texts.
        """
        if self._template:
            return self._filled(query, document)
        library, vocab = self._lib, self._vocab
        first, last, between = (
            int(library.llama_vocab_bos(vocab)),
            int(library.llama_vocab_eos(vocab)),
            int(library.llama_vocab_sep(vocab)),
        )
        begin = [first] if library.llama_vocab_get_add_bos(vocab) else []
        end = [last if last >= 0 else between] if library.llama_vocab_get_add_eos(vocab) else []
        middle = [between] if library.llama_vocab_get_add_sep(vocab) else []
        texts = [self._tokenizer.encode(text, add_special=False) for text in (query, document)]
        return [*begin, *texts[0], *end, *middle, *texts[1], *end]

    def scores(self, pairs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return the score of each pair of token ids: float32[len(pairs)]. Raises what `pooled` raises."""
        return self.pooled(pairs, 1)[:, 0]

    def _filled(self, query: str, document: str) -> list[int]:
        """The template with the texts in their places, in which no control token's name is read as one."""
        texts = {"query": query, "document": document}
        pieces: list[str] = []
        literal: list[tuple[int, int]] = []
        at = 0
        for index, piece in enumerate(_PLACES.split(self._template)):
            text = texts[piece] if index % 2 else piece
            if index % 2:
                literal.append((at, at + len(text)))
            pieces.append(text)
            at += len(text)
        return self._tokenizer.encode("".join(pieces), add_special=False, parse_special=True, literal=literal)


def _has_head(model: ModelFile) -> bool:
    return any(name in model.tensors for name in ("cls.weight", "cls.output.weight"))
