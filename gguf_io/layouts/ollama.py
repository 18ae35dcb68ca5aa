"""The layouts that Ollama publishes models in, and how each differs from llama.cpp's.

Source: llama/compat and convert/ of ollama/ollama at fb307609 (August 2026), which translates the same files when it
loads them. Files that Ollama converts today are in the standard layout; no mark matches them, so they stay unchanged.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gguf_io.layouts.draft import HeaderDraft
from gguf_io.metadata import MetadataArray, Scalar

# Parts of a file outside the text model, by the prefix of their tensors' names.
OTHER_PARTS = {
    "v.": "vision",
    "model.vision_tower.": "vision",
    "s.": "vision (SAM)",
    "a.": "audio",
    "mm.": "projector",
    "mtp.": "multi-token prediction",
}
Mark = Callable[[HeaderDraft], bool]
_BYTE_TOKEN, _NORMAL_TOKEN = 6, 1


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """How an architecture's files differ from the standard, applied in the order of the fields. A key that begins with
    a dot is prefixed with the architecture.

    marks: any that matches identifies a file in this layout; without marks, all files of the architecture are in it.
    becomes: the architecture's standard name. copied: by key, the key that gets its value if it has none. written:
    values of keys, each with its type's struct code. missing: the same, for missing keys only. renamed: see
    Draft.rename. more: changes that depend on sizes or values.
    """

    marks: tuple[Mark, ...] = ()
    becomes: str = ""
    copied: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, tuple[str, Scalar]] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, Scalar]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    more: tuple[Callable[[HeaderDraft], None], ...] = ()

    def applies(self, draft: HeaderDraft) -> bool:
        """Whether a file of the architecture is in this layout."""
        return not self.marks or any(mark(draft) for mark in self.marks)

    def rewrite(self, draft: HeaderDraft) -> None:
        """Translate it to the standard layout, except for the tensors of OTHER_PARTS."""
        if self.becomes:
            draft.become(self.becomes)
        for source, target in self.copied.items():
            draft.copy(source, target)
        for key, (code, value) in self.written.items():
            draft.set(key, code, value)
        for key, (code, value) in self.missing.items():
            draft.default(key, code, value)
        draft.rename(self.renamed)
        for change in self.more:
            change(draft)


def _has(*keys: str) -> Mark:
    return lambda draft: draft.has(*keys)


def _lacks(key: str) -> Mark:
    return lambda draft: not draft.has(key)


def _is(key: str, text: str) -> Mark:
    return lambda draft: draft.text(key) == text


def _tensor(*beginnings: str) -> Mark:
    return lambda draft: draft.any_tensor(*beginnings)


def _other_vocabulary(draft: HeaderDraft) -> bool:
    """Gemma 3n: whether the two embedding tables have vocabularies of different sizes."""
    whole, text = draft.shape("token_embd.weight"), draft.shape("per_layer_token_embd.weight")
    return whole is not None and text is not None and whole[0] != text[0]


def _spelt_characters(draft: HeaderDraft) -> bool:
    value = draft.values.get(_CHARACTERS)
    return isinstance(value, MetadataArray) and value.code == "s"


def _experts(draft: HeaderDraft) -> bool:
    return any(draft.number(key) for key in (".expert_count", ".expert_used_count"))


def _without_embedding_norm(draft: HeaderDraft) -> bool:
    return draft.shape("output_norm.weight") is not None and draft.shape("token_embd_norm.weight") is None


def _nameless_llama_3(draft: HeaderDraft) -> bool:
    """Llama 3's vocabulary without the name of its pre-tokenizer."""
    if draft.text(_PRE) not in (None, "", "default") or draft.text(_MODEL) != "gpt2":
        return False
    tokens = draft.tokens()
    return len(tokens) > 128009 and (tokens[128006], tokens[128009]) == ("<|start_header_id|>", "<|eot_id|>")


def _size(key: str, tensor: str, dimension: int) -> Callable[[HeaderDraft], None]:
    """Set a key to a dimension of a tensor's shape, outermost first, in the first layer that has the tensor."""

    def change(draft: HeaderDraft) -> None:
        shapes = (draft.shape(tensor.format(layer)) for layer in range(_LAYERS))
        if found := next((shape for shape in shapes if shape and len(shape) > dimension), None):
            draft.set(key, "I", found[dimension])

    return change


def _missing_size(key: str, tensor: str, dimension: int) -> Callable[[HeaderDraft], None]:
    change = _size(key, tensor, dimension)
    return lambda draft: None if draft.has(key) else change(draft)


def _pre_tokenizer(name: str) -> Callable[[HeaderDraft], None]:
    """Set the pre-tokenizer's name if the file gives none."""
    return lambda draft: draft.set(_PRE, "s", name) if draft.text(_PRE) in (None, "", "default") else None


def _sections(*sources: str) -> Callable[[HeaderDraft], None]:
    """Set the RoPE sections from the first key that has at least three: four of them, padded with 0."""

    def change(draft: HeaderDraft) -> None:
        found = next((numbers for key in sources if len(numbers := draft.numbers(key)) >= 3), None)
        if found:
            draft.set(".rope.dimension_sections", "i", [*found, 0][:4])

    return change


def _largest(key: str) -> Callable[[HeaderDraft], None]:
    """Replace an array, 0 in layers without attention, by its largest number."""

    def change(draft: HeaderDraft) -> None:
        if largest := max(draft.numbers(key), default=0):
            draft.set(key, "I", largest)

    return change


def _cut_vocabulary(draft: HeaderDraft) -> None:
    """Keep as many tokens as there are embeddings; the tokens after them stand for images."""
    if table := draft.shape("token_embd.weight"):
        draft.cut_vocabulary(table[0])


def _stretched_positions(draft: HeaderDraft) -> None:
    """Gemma 3 from 4B up scales positions linearly by 8, which old files leave out."""
    if (draft.number(".context_length") or 0) >= 131072:
        draft.default(".rope.scaling.type", "s", "linear")
        draft.default(".rope.scaling.factor", "f", 8.0)


def _dense_sizes(draft: HeaderDraft) -> None:
    """Sizes of EmbeddingGemma's two dense layers, from their shapes."""
    draft.drop(".attention.causal", ".attention.sliding_window_pattern")
    for name in ("dense_2", "dense_3"):
        shape = draft.shape(f"{name}.weight")
        if shape and len(shape) == 2:
            draft.set(f".{name}_feat_in", "I", shape[1])
            draft.set(f".{name}_feat_out", "I", shape[0])


def _gemma3n_vocabulary(draft: HeaderDraft) -> None:
    """Keep only the text vocabulary, and correct the types of its tokens."""
    if table := draft.shape("per_layer_token_embd.weight"):
        draft.cut_rows("token_embd.weight", table[0])
        draft.cut_vocabulary(table[0])
    tokens, kinds = draft.tokens(), draft.numbers("tokenizer.ggml.token_type")
    if len(tokens) == len(kinds) > 0:
        corrected = [_kind(str(token), kind) for token, kind in zip(tokens, kinds, strict=True)]
        draft.set("tokenizer.ggml.token_type", "i", corrected)


def _kind(token: str, kind: int) -> int:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return _BYTE_TOKEN
    return _NORMAL_TOKEN if token.startswith("<unused") else kind


def _absorbed_attention(draft: HeaderDraft) -> None:
    """GLM 4.7 Flash: head sizes as llama.cpp's DeepSeek 2 defines them, with one head of compressed keys."""
    head, rank, turned = map(
        draft.number, (".attention.key_length", ".attention.kv_lora_rank", ".rope.dimension_count")
    )
    draft.set(".attention.head_count_kv", "I", 1)
    if head is not None and rank is not None and turned is not None:
        draft.set(".attention.key_length", "I", rank + turned)
        draft.set(".attention.value_length", "I", rank)
        draft.set(".attention.key_length_mla", "I", head)
        draft.set(".attention.value_length_mla", "I", head)


def _ends(draft: HeaderDraft) -> None:
    """The EOT and EOM tokens, from the list of all end tokens."""
    for key, token in zip(("eot", "eom"), draft.numbers("tokenizer.ggml.eos_token_ids")[1:], strict=False):
        draft.default(f"tokenizer.ggml.{key}_token_id", "I", token)


def _shared_experts(draft: HeaderDraft) -> None:
    """DeepSeek OCR: how many experts make up the shared one."""
    shape, width = draft.shape("blk.1.ffn_down_shexp.weight"), draft.number(".expert_feed_forward_length")
    if shape and width:
        draft.default(".expert_shared_count", "I", shape[-1] // width)


def _deep_layers(draft: HeaderDraft) -> None:
    draft.default(".n_deepstack_layers", "I", len(draft.numbers(".vision.deepstack_visual_indexes")))


def _characters(draft: HeaderDraft) -> None:
    """Snowflake Arctic Embed 2: decode a character map stored as base64, one letter per array item."""
    value = draft.values[_CHARACTERS]
    if isinstance(value, MetadataArray):
        try:
            data = base64.b64decode("".join(map(str, value)), validate=True)
        except ValueError as error:
            raise draft.error(_CHARACTERS, f"is not base64 ({error})") from error
        draft.set(_CHARACTERS, "B", list(data))


_LAYERS = 1024
_MODEL, _PRE, _CHARACTERS = (f"tokenizer.ggml.{key}" for key in ("model", "pre", "precompiled_charsmap"))
_IMAGES = _tensor("v.", "mm.")
_QWEN35 = LayoutRule(
    marks=(
        _has(".vision.block_count", ".image_token_id", ".ssm.v_head_reordered", ".rope.mrope_interleaved"),
        _tensor("mtp.", "v."),
    ),
    renamed={r"\.ssm_dt$": ".ssm_dt.bias"},
    more=(
        _largest(".attention.head_count_kv"),
        _sections(".rope.dimension_sections", ".rope.mrope_section", ".mrope_sections"),
    ),
)
_QWEN3VL = LayoutRule(
    marks=(_lacks(".rope.dimension_sections"), _IMAGES),
    more=(
        _sections(".rope.dimension_sections", ".rope.mrope_section"),
        # All of Qwen3-VL has heads of 128 and these sections, which older files leave out.
        lambda draft: draft.default(".rope.dimension_sections", "i", [24, 20, 20, 0]),
        _deep_layers,
    ),
)
_GEMMA3 = LayoutRule(
    marks=(
        _IMAGES,
        _has(".mm.tokens_per_image", ".rope.global.freq_base", ".rope.local.freq_base"),
        _has("tokenizer.ggml.add_padding_token", "tokenizer.ggml.add_unknown_token"),
        _lacks(".attention.layer_norm_rms_epsilon"),
    ),
    copied={".rope.global.freq_base": ".rope.freq_base", ".rope.local.freq_base": ".rope.freq_base_swa"},
    missing={
        ".attention.layer_norm_rms_epsilon": ("f", 1e-6),
        ".rope.freq_base": ("f", 1_000_000.0),
        ".rope.freq_base_swa": ("f", 10_000.0),
    },
    more=(_stretched_positions, _cut_vocabulary),
)
_LFM2 = LayoutRule(
    marks=(_without_embedding_norm, _IMAGES),
    written={_PRE: ("s", "lfm2")},
    renamed={r"^output_norm\.": "token_embd_norm."},
)
_NEMOTRON = LayoutRule(
    marks=(_tensor("mtp."), lambda draft: any(".ffn_latent_in" in name for name in draft.tensors)),
    renamed={r"\.ffn_latent_in\b": ".ffn_latent_down", r"\.ffn_latent_out\b": ".ffn_latent_up"},
    more=(_missing_size(".moe_latent_size", "blk.{}.ffn_latent_down.weight", 0),),
)

# By the architecture that the file names; the first rule that applies is used.
RULES: Mapping[str, tuple[LayoutRule, ...]] = {
    "bert": (LayoutRule(marks=(_spelt_characters,), more=(_characters,)),),
    "deepseekocr": (
        LayoutRule(
            becomes="deepseek2-ocr",
            missing={".attention.layer_norm_rms_epsilon": ("f", 1e-6)},
            more=(_missing_size(".expert_feed_forward_length", "blk.{}.ffn_down_exps.weight", 2), _shared_experts),
        ),
    ),
    "gemma3": (
        replace(
            _GEMMA3,
            marks=(_tensor("dense.0.weight"),),
            becomes="gemma-embedding",
            renamed={r"^dense\.0\.": "dense_2.", r"^dense\.1\.": "dense_3.", r"^norm\.": "output_norm."},
            more=(_dense_sizes, _cut_vocabulary),
        ),
        _GEMMA3,
    ),
    "gemma3n": (
        LayoutRule(marks=(_other_vocabulary,), written={_MODEL: ("s", "llama")}, more=(_gemma3n_vocabulary,)),
        LayoutRule(marks=(_tensor("v.", "a.", "mm."),)),
    ),
    "gemma4": (
        LayoutRule(
            marks=(_tensor("a.", "v.", "mm.", "model.vision_tower."), _is(_MODEL, "llama")),
            renamed={r"\.ffn_gate_inp\.per_expert_scale$": ".ffn_down_exps.scale"},
            # Its vocabulary uses byte pairs, whatever the file calls it.
            more=(lambda draft: draft.set(_MODEL, "s", "gemma4") if draft.text(_MODEL) == "llama" else None,),
        ),
    ),
    "glm4moelite": (
        LayoutRule(
            becomes="deepseek2",
            written={_PRE: ("s", "glm4")},
            missing={".expert_group_count": ("I", 1), ".expert_group_used_count": ("I", 1)},
            more=(_absorbed_attention, _ends),
        ),
    ),
    "gptoss": (
        LayoutRule(
            becomes="gpt-oss",
            written={_PRE: ("s", "gpt-4o")},
            missing={".rope.scaling.type": ("s", "yarn")},
            renamed={
                r"\.attn_out\b": ".attn_output",
                r"\.attn_sinks$": ".attn_sinks.weight",
                r"\.ffn_norm\b": ".post_attention_norm",
            },
            more=(_missing_size(".expert_feed_forward_length", "blk.{}.ffn_gate_exps.weight", 1),),
        ),
    ),
    "laguna": (
        LayoutRule(
            marks=(
                _has(".rope.swa.dimension_count", ".rope.swa.freq_base"),
                lambda draft: draft.shape("blk.0.attn_g.weight") is not None,
            ),
            copied={
                ".rope.swa.dimension_count": ".rope.dimension_count_swa",
                ".rope.swa.freq_base": ".rope.freq_base_swa",
            },
            renamed={r"\.attn_g\.": ".attn_gate."},
        ),
    ),
    "lfm2": (replace(_LFM2, more=(_size(".feed_forward_length", "blk.{}.ffn_gate.weight", 0),)),),
    "lfm2moe": (_LFM2,),
    "llama": (LayoutRule(marks=(_nameless_llama_3,), written={_PRE: ("s", "llama-bpe")}),),
    "llama4": (LayoutRule(marks=(_IMAGES,)),),
    "mistral3": (
        LayoutRule(
            marks=(
                _IMAGES,
                _has(".rope.scaling.beta_fast", ".rope.scaling.mscale_all_dim", ".rope.scaling_beta"),
            ),
            copied={
                ".rope.scaling.beta_fast": ".rope.scaling.yarn_beta_fast",
                ".rope.scaling.beta_slow": ".rope.scaling.yarn_beta_slow",
                ".rope.scaling.mscale_all_dim": ".rope.scaling.yarn_log_multiplier",
                ".rope.scaling_beta": ".attention.temperature_scale",
            },
            more=(_pre_tokenizer("tekken"),),
        ),
    ),
    "nemotron_h_moe": (_NEMOTRON,),
    "nemotron_h_omni": (
        replace(_NEMOTRON, marks=(_experts,), becomes="nemotron_h_moe"),
        LayoutRule(becomes="nemotron_h"),
    ),
    "olmo3": (LayoutRule(becomes="olmo2"),),
    "qwen25vl": (LayoutRule(becomes="qwen2vl", more=(_sections(".rope.dimension_sections", ".rope.mrope_section"),)),),
    "qwen35": (_QWEN35,),
    "qwen35moe": (_QWEN35,),
    "qwen3next": (
        LayoutRule(
            marks=(lambda draft: any(name.endswith(".ssm_dt") for name in draft.tensors), _tensor("mtp.")),
            renamed=_QWEN35.renamed,
            more=(_largest(".attention.head_count_kv"),),
        ),
    ),
    "qwen3vl": (_QWEN3VL,),
    "qwen3vlmoe": (_QWEN3VL,),
}
