"""The layer behind a model's last one that predicts a token further (multi-token prediction): a program of its own.

A row joins the embedding of a token with the model's state after the token before it, each normalised; a product makes
a row of the residual stream of both, and a layer like the others and the model's output follow (DeepSeek-V3's report,
2.2; tensors blk.N.nextn.*). States are those behind the last norm, the model's or this layer's own, so that the layer
can go on from its own guess.

The output is computed for as many ids as the caller wants: vocabularies are ordered by how early a token was merged, so
that most of a text has low ones, and a draft that cannot have the others costs less than it loses.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import norms
from cpu_kernels.program import ProgramBuilder
from cpu_kernels.records import Barrier, Stage
from cpu_kernels.threads import ThreadTeam
from gguf_io import ModelFile
from models.architecture import Architecture
from models.config import ModelConfig
from models.decoder import DecoderRecorder
from models.kv_layout import KVTypes, bytes_of_tokens
from models.kv_pages import PageStore, Sequence
from models.layer_sizes import ALL_COUNT
from models.recording import FixedPlace, Recording, Rows
from models.rope_tables import Ropes
from models.steps import LoadProgress, Steps
from models.weights import WeightLoader

MAX_ROWS = 64
MAX_SEQUENCES = 8
MAX_TOKENS = 512
"""Of each sequence that the layer stores keys and values of."""
_LEAST_IDS, _SHARES_OF_IDS = 32_768, (4, 2, 1)  # what is guessed from: a quarter of all ids, half of them, all
_VECTOR = 16
_JOINS = {f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")}
_OPTIONAL = {f"nextn.{name}.weight" for name in ("embed_tokens", "shared_head_head", "shared_head_norm")}


def prediction_config(file: ModelFile, config: ModelConfig, architecture: Architecture) -> ModelConfig | None:
    """Sizes for the layer alone, which comes behind layers that have nothing; None where there is none of a known kind.

    It is of a known kind where it has the tensors of a layer with attention, and those that join.
    """
    layer, own = config.layers, _shapes(file, config.layers)
    further = {name for name in own if name.startswith("nextn.")}
    if not architecture.drafts or config.narrows or not _JOINS <= further <= _JOINS | _OPTIONAL:
        return None
    own = {name: shape for name, shape in own.items() if name not in further}
    like = next((one for one in range(layer) if config.attends[one] and _shapes(file, one) == own), None)
    if like is None or config.embedding % _VECTOR:
        return None
    count, dense = layer + 1, like < config.dense_layers
    return replace(
        config,
        layers=count,
        attends=(*[False] * layer, True),
        recurs=(False,) * count,
        layer_heads=(config.layer_heads[like],) * count,
        kv_layers=tuple(range(count)),
        dense_layers=count if dense else 0,
        dense_feed_forwards=(config.dense_feed_forwards[like],) * count if dense else (),
        sparsity=(ALL_COUNT,) * count,
        experts=0 if dense else config.experts,
        delta_net=None,
        scan=None,
        convolution=0,
        joins=True,
    )


def _shapes(file: ModelFile, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, by their names in it."""
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): one.shape for name, one in file.tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that follow a sequence of the layer's: tokens, and float32[tokens, embedding] states before each of them."""

    sequence: Sequence
    tokens: Ordered[int]
    states: NDArray[np.float32]


class PredictionLayer:
    """The layer's program, and the pages of its keys and values, for MAX_SEQUENCES of MAX_TOKENS tokens.

    Positions are the layer's own: they need not be those of the text, for rotation tells distances alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        architecture: Architecture,
        loader: WeightLoader,
        types: KVTypes,
        threads: int,
    ) -> None:
        """Load and record. config: what prediction_config gave. Raises UnsupportedModelError for unusable tensors."""
        self._config, self._layer = config, config.layers - 1
        self.builder = ProgramBuilder()
        self.store = PageStore(config, MAX_SEQUENCES * bytes_of_tokens(config, types, MAX_TOKENS), types)
        self._ropes = Ropes(config, architecture, loader, config.context)
        self._recording = Recording(self.builder, loader, config, architecture, MAX_ROWS, threads)
        self._joined = self._recording.rows(2 * config.embedding)
        self.norm = loader.vector(f"{architecture.norms.output}.weight", config.embedding)[: config.embedding]
        self.epsilon = config.epsilon
        self._record()

    @property
    def width(self) -> int:
        """Values of a state."""
        return self._config.embedding

    @property
    def stored_bytes(self) -> int:
        """Bytes of the pages and of the tables of rotation."""
        of_pages = MAX_SEQUENCES * MAX_TOKENS * self.store.bytes_per_token
        return of_pages + MAX_TOKENS * self._ropes.position_bytes

    def start(self, team: ThreadTeam, progress: LoadProgress | None) -> None:
        """Compile what the program needs, before the first `run`."""
        self._steps = Steps(self.builder, team, self._config, MAX_ROWS, progress)

    def run(self, parts: Ordered[Part], ids: int = 0) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Append at most MAX_ROWS rows; the token guessed after each part's last, and the state after it.

        ids: what is guessed is below this, which is one of `reaches`; 0 to guess nothing.
        """
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[tuple[Sequence, int, int]] = []
        width = self._config.embedding
        for part in parts:
            first, count, start = len(tokens), len(part.tokens), part.sequence.length
            self._joined.values[first : first + count, width : 2 * width] = part.states
            self.store.append(part.sequence, count)
            segments.append((part.sequence, first, count))
            positions += range(start, start + count)
            tokens += part.tokens
        wanted = [first + count - 1 for _, first, count in segments] if ids else []
        self._steps.program.set_argument(self._output, 1, -(-ids // self._group_rows))
        self._steps.place(tokens, positions, segments, self._ropes)
        self._steps.run(len(tokens), wanted)
        found = self._logits.values[: len(wanted), :ids].argmax(axis=1) if ids else np.zeros(0, np.int64)
        return found, np.asarray(self._recording.x.values[wanted, :width], np.float32)

    def _record(self) -> None:
        recording, config, joined = self._recording, self._config, self._joined
        loader, builder, width = recording.loader, self.builder, config.embedding
        prefix = f"blk.{self._layer}.nextn."
        own = prefix + "embed_tokens.weight"
        table = loader.matrix(own if loader.has(own) else "token_embd.weight", config.vocabulary, width)
        builder.add(
            table.format.embed,
            table.address,
            table.group_bytes,
            table.format.group_rows,
            table.k,
            joined.address,
            joined.stride,
            builder.scalar(1.0),
            barrier=Barrier.ALWAYS,
        )
        for at, name in enumerate(("enorm", "hnorm")):
            weight = recording.vector(f"{prefix}{name}.weight", width)
            place = (joined.address + 4 * width * at, joined.stride)
            builder.add(norms.norm_rows, *place, weight, width, width, recording.epsilon, barrier=Barrier.ALWAYS)
        joining = loader.matrix(prefix + "eh_proj.weight", width, 2 * width)
        recording.pack(joined, 2 * width, joining.format.form, stride=joined.stride)
        recording.product(joining, recording.x, last=True)
        DecoderRecorder(recording, self.store, self._ropes).record_layer(self._layer)
        own = prefix + "shared_head_norm"
        recording.norm(own if loader.has(own + ".weight") else recording.architecture.norms.output)
        self._record_output(prefix)

    def _record_output(self, prefix: str) -> None:
        recording, config, loader = self._recording, self._config, self._recording.loader
        names = (prefix + "shared_head_head.weight", "output.weight", "token_embd.weight")
        name = next(name for name in names if loader.has(name))
        output = loader.matrix(name, config.vocabulary, config.embedding)
        self._logits, self._group_rows = Rows(self.builder, MAX_SEQUENCES, output.rows), output.format.group_rows
        recording.norm_pack(None, output.format.form, wanted=True)
        place = FixedPlace(self._logits.address, self._logits.stride)
        self._output = recording.product(output, place, last=True, stage=Stage.WANTED)
        shares = (max(config.vocabulary // share, _LEAST_IDS) for share in _SHARES_OF_IDS)
        self.reaches = tuple(dict.fromkeys(min(ids, config.vocabulary) for ids in shares))
        """How many ids can be guessed from, fewest first."""
