# ruff: noqa: RUF001 - some models write their token names with look-alike characters
"""Generated vocabularies: specifics of SentencePiece and word pieces, special tokens, end-of-generation names, damaged
files.
"""

import contextvars
import re
import threading
import time
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_io import load_tokenizer
from gguf_io.errors import ModelFileError, TokenizerError
from gguf_io.interruption import CHECKPOINT
from gguf_io.tokenizer.pretokenizers import PRE_TOKENIZERS
from gguf_io.tokenizer.sentence_pieces import SentencePieces
from tests.gguf_io.tokenizer_files import (
    BYTE,
    CONTROL,
    FRAGMENTS,
    NORMAL,
    TEXTS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    pairs_without_brackets,
    sample_texts,
    trained_pairs,
    write_vocabulary,
)
from tests.oracle import llama_oracle

cached_tokenizer = cache(load_tokenizer)

SPECIALS = {
    "<a>": CONTROL,
    "<a><b>": CONTROL,
    "b><c>": CONTROL,
    "<c>": USER_DEFINED,
    "<c><d>": CONTROL,
    "▁▁▁▁": USER_DEFINED,
    "\n\n": USER_DEFINED,
    "  \t": USER_DEFINED,
    "<mask>": CONTROL,
    "<|end|>": NORMAL,
    "</s>": CONTROL,
    "<|endoftext|>": CONTROL,
}
SPECIAL_TEXTS = st.lists(
    st.sampled_from([*SPECIALS, "<a", ">", "<", "b>", "<d>", " ", "  ", "\n", "\t", "x", "hello ", "é"]), max_size=12
).map("".join)


@cache
def pieces():
    """An SPM vocabulary of 1500 tokens: merges of sample texts by score, bytes, and the special tokens above."""
    learnt = [token for token in pairs_without_brackets(byte_level=False)[0] if token not in SPECIALS][:1200]
    types = {"<unk>": UNKNOWN, "<s>": CONTROL} | SPECIALS
    types |= {f"<0x{value:02X}>": BYTE for value in range(256)}
    types |= {token: NORMAL for token in learnt if token not in types}
    scores = [0.0 if kind != NORMAL else -float(index // 2) for index, kind in enumerate(types.values())]
    return list(types), list(types.values()), scores


@cache
def spm_characters():
    return {" ", *pieces()[0]}


def write_pieces(path, drop_bytes=False, **options):
    tokens, types, scores = pieces()
    if drop_bytes:
        kept = [index for index, kind in enumerate(types) if kind != BYTE]
        tokens, types, scores = ([values[index] for index in kept] for values in (tokens, types, scores))
    return write_vocabulary(
        path, tokens, **({"model": "llama", "types": types, "scores": scores, "eos_token_id": 12} | options)
    )


@pytest.fixture(scope="module")
def spm_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spm")
    return {
        "plain": write_pieces(folder / "plain.gguf"),
        "gemma": write_pieces(folder / "gemma.gguf", add_space_prefix=False),
        "phi-3": write_pieces(folder / "phi-3.gguf", name="Phi-3 mini"),
        "eos": write_pieces(folder / "eos.gguf", add_eos_token=True, add_bos_token=False),
        "untyped": write_pieces(folder / "untyped.gguf", types=None),
        "rounded": write_pieces(folder / "rounded.gguf", scores=[int(score) for score in pieces()[2]]),
        "unscored": write_pieces(folder / "unscored.gguf", scores=None),
        "jina": write_pieces(folder / "jina.gguf", pre="jina-v2-de"),
    }


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("name", ["plain", "gemma", "phi-3", "eos", "untyped", "rounded", "unscored", "jina"])
@settings(max_examples=150)
@given(text=st.one_of(TEXTS, SPECIAL_TEXTS), parse_special=st.booleans())
def test_sentence_pieces(spm_files, name, text, parse_special):
    path = spm_files[name]
    if name == "untyped":  # the oracle finds no byte tokens in it, and refuses text that needs them
        known = spm_characters()
        text = "".join(character for character in text if character in known)
    expected = llama_oracle.tokenize(path, text, parse_special=parse_special)
    assert cached_tokenizer(path).encode(text, True, parse_special) == expected


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("lstrip", [False, True])
@settings(max_examples=200)
@given(text=SPECIAL_TEXTS, parse_special=st.booleans())
def test_special_tokens_among_byte_pairs(tmp_path_factory, lstrip, text, parse_special):
    path = tmp_path_factory.getbasetemp() / f"specials-{lstrip}.gguf"
    if not path.exists():
        tokens, merges = pairs_without_brackets(byte_level=True)
        specials = {token: kind for token, kind in SPECIALS.items() if token not in tokens}
        types = [NORMAL] * len(tokens) + list(specials.values())
        pre = "jina-v2-es" if lstrip else "qwen2"
        write_vocabulary(
            path, [*tokens, *specials], pre=pre, merges=merges, types=types, bos_token_id=0, eos_token_id=1
        )
    expected = llama_oracle.tokenize(path, text, parse_special=parse_special)
    assert cached_tokenizer(path).encode(text, True, parse_special) == expected


def test_merges_that_lead_to_a_control_token_are_left_out(tmp_path):
    tokens, merges = trained_pairs(byte_level=True)
    control = tokens.index("</s>")
    types = [CONTROL if token == control else NORMAL for token in range(len(tokens))]
    path = write_vocabulary(tmp_path / "merged.gguf", tokens, pre="poro-chat", merges=merges, types=types)
    tokenizer = load_tokenizer(path)
    assert control not in tokenizer.encode("a </s></s>b")
    assert tokenizer.decode(tokenizer.encode("a </s></s>b")) == "a </s></s>b"
    assert tokenizer.encode("a</s>", parse_special=True)[-1] == control


def word_pieces():
    words = Counter(word for text in sample_texts(5, 3000) for word in re.findall(r"\w+", text.lower()))
    characters = sorted({character for fragment in FRAGMENTS for character in fragment.lower() if character > " "})
    types = {"[PAD]": CONTROL} | {f"[unused{index}]": UNUSED for index in range(99)}
    types |= dict.fromkeys(["[UNK]", "[CLS]", "[SEP]", "[MASK]"], CONTROL)
    types |= dict.fromkeys(
        [
            *(f"▁{character}" for character in characters),
            *(character for character in characters if character.isalnum()),
            *(f"▁{word}" for word, _ in words.most_common(300)),
            *(word[-3:] for word, _ in words.most_common(300)),
        ],
        NORMAL,
    )
    return list(types), list(types.values())


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("options", [{}, {"normalizer__lowercase": False}, {"normalizer__strip_accents": False}])
def test_word_pieces(tmp_path, options):
    tokens, types = word_pieces()
    path = write_vocabulary(tmp_path / "words.gguf", tokens, model="bert", types=types, **options)
    tokenizer = load_tokenizer(path)
    # In other scripts llama.cpp departs from the models' own tokenizer, see test_word_pieces.
    texts = [re.sub("[^\n\t -~À-öø-ÿ一-龥]", "", text) for text in sample_texts(6, 600)]
    for text in [*texts, "", " ", "Hello [MASK] world", "unaffable UNAFFABLE"]:
        for parse_special in (False, True):
            expected = llama_oracle.tokenize(path, text, parse_special=parse_special)
            assert tokenizer.encode(text, True, parse_special) == expected, text
    for token in range(len(tokens)):
        assert tokenizer.token_bytes(token) == llama_oracle.piece(path, token, special=True)


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize(
    "names",
    [
        ["<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>"],
        ["<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>", "<|start|>"],
        ["<|calls|>", "<|flush|>", "<|end|>"],
        ["<|end|>", "<|file_sep|>"],
        ["<eos>", "<turn|>", "<|tool_response>", "</s>"],
        ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
        ["[EOT]", "[EOS]", "[PAD]", "[e~["],
        ["<end_of_turn>", "<PRE>", "<SUF>", "<MID>"],
        ["<｜end▁of▁sentence｜>", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<end_of_utterance>"],
    ],
)
def test_ends_and_roles_by_name(tmp_path, names):
    tokens, merges = pairs_without_brackets(byte_level=True)
    types = [NORMAL] * (len(tokens) + len(names))
    path = write_vocabulary(
        tmp_path / "names.gguf",
        [*tokens, *names],
        pre="qwen2",
        merges=merges,
        types=types,
        bos_token_id=0,
        eos_token_id=1,
    )
    tokenizer = load_tokenizer(path)
    api = llama_oracle.api()
    vocab = api.llama_model_get_vocab(llama_oracle.load(path, vocab_only=True))
    named = range(len(tokens), len(types))
    assert tokenizer.eog_ids == {token for token in (0, 1, *named) if api.llama_vocab_is_eog(vocab, token)}
    assert [tokenizer.is_control(token) for token in named] == [
        api.llama_vocab_is_control(vocab, token) for token in named
    ]
    roles = {
        "eot": tokenizer.vocabulary.special.get("eot"),
        "fim_pre": tokenizer.fim_prefix_id,
        "fim_suf": tokenizer.fim_suffix_id,
        "fim_mid": tokenizer.fim_middle_id,
    }
    for role, token in roles.items():
        theirs = getattr(api, f"llama_vocab_{role}")(vocab)
        # If several tokens have an end-of-turn name, llama.cpp takes any of them.
        assert token == (None if theirs == -1 else theirs) or (role == "eot" and {token, theirs} <= tokenizer.eog_ids)


def test_text_that_no_token_can_express(tmp_path):
    alien = "\U0001f9ff\U0001f9ff"
    known = write_pieces(tmp_path / "known.gguf", drop_bytes=True, add_space_prefix=False)
    assert load_tokenizer(known).encode(alien, add_special=False) == [0]
    words = write_vocabulary(tmp_path / "words.gguf", ["[CLS]", "[SEP]", "▁a"], model="bert", types=[NORMAL] * 3)
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.unknown_token_id is missing"):
        load_tokenizer(words).encode("a")


@pytest.mark.slow
@pytest.mark.parametrize("pre", sorted({row.patterns: name for name, row in PRE_TOKENIZERS.items()}.values()))
def test_long_runs_take_no_time_by_their_square(tmp_path, pre):
    tokens, merges = trained_pairs(PRE_TOKENIZERS[pre].byte_level)
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "runs.gguf", tokens, pre=pre, merges=merges))
    for run in ("1", " ", "\n", "a", "aB", "!", "'", "é", "中", "\u0301", "a ", "1 "):
        text = run * 10_000
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_other_threads_run_while_a_long_text_is_cut(tmp_path):
    tokens, merges = trained_pairs(True)
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "long.gguf", tokens, merges=merges))
    tokenizer.encode("first")
    text, turns = "hello world 12 " * 20_000, 0
    work = threading.Thread(target=tokenizer.encode, args=(text,))
    work.start()
    while work.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d"])
def test_lone_surrogates_are_replacement_characters(tmp_path, text):
    tokenizer = load_tokenizer(write_pieces(tmp_path / "spm.gguf", add_space_prefix=False))
    replaced = re.sub("[\ud800-\udfff]", "\ufffd", text)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == replaced


@pytest.mark.parametrize("token", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_an_error(tmp_path, token):
    tokenizer = load_tokenizer(write_pieces(tmp_path / "spm.gguf"))
    for ask in (tokenizer.token_bytes, tokenizer.is_control):
        with pytest.raises(TokenizerError, match=f"token {token} is outside the vocabulary"):
            ask(token)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "rwkv"}, TokenizerError, r"tokenizer\.ggml\.model is 'rwkv'"),
        ({"tokens": ["a", "b", "a"], "types": None, "scores": None}, TokenizerError, "0 and 2 are both 'a'"),
        ({"types": [NORMAL]}, ModelFileError, r"tokenizer\.ggml\.token_type: must have"),
        ({"scores": [0.5]}, ModelFileError, r"tokenizer\.ggml\.scores: must have"),
        ({"model": "gpt2", "pre": "gpt-2"}, ModelFileError, r"tokenizer\.ggml\.merges: is missing"),
        (
            {"model": "gpt2", "pre": "gpt-2", "merges": [], "eos_token_id": 4294967295, "add_eos_token": True},
            TokenizerError,
            "add_eos_token is true, but the file has no eos token",
        ),
        ({"tokens": ["<unk>", "<0xZZ>"], "types": [UNKNOWN, BYTE], "scores": None}, TokenizerError, "must be a byte"),
    ],
)
def test_damaged_files_are_an_error_that_names_the_field(tmp_path, options, error, message):
    tokens = options.pop("tokens", pieces()[0])
    path = (
        write_vocabulary(tmp_path / "damaged.gguf", tokens, **({"model": "llama"} | options))
        if "scores" in options and options["scores"] is None
        else write_pieces(tmp_path / "damaged.gguf", **options)
    )
    with pytest.raises(error, match=message):
        tokenizer = load_tokenizer(path)
        tokenizer.encode("text")
        tokenizer.decode(range(tokenizer.vocab_size))


class _EnoughError(Exception):
    """The result is no longer needed."""


def interrupted(calls, work, *arguments):
    """Whether work ends at this checkpoint."""
    left = iter(range(calls - 1))

    def check():
        if next(left, None) is None:
            raise _EnoughError

    def run():
        CHECKPOINT.set(check)
        work(*arguments)

    with pytest.raises(_EnoughError):
        contextvars.copy_context().run(run)


@pytest.mark.parametrize("calls", [1, 50, 250])
def test_a_checkpoint_ends_the_work(tmp_path, calls):
    tokenizer = load_tokenizer(write_pieces(tmp_path / "pieces.gguf"))
    interrupted(calls, lambda: tokenizer.encode("<a>x" * 100, parse_special=True))


def write_words(path, *more):
    """An SPM vocabulary whose tokens do not span words, and further tokens."""
    tokens, types, scores = pieces()
    kept = [index for index, token in enumerate(tokens) if not re.search("[^\u2581]\u2581|\n.", token)]
    return write_vocabulary(
        path,
        [*(tokens[index] for index in kept), *more],
        model="llama",
        types=[*(types[index] for index in kept), *(NORMAL for _ in more)],
        scores=[*(scores[index] for index in kept), *(0.0 for _ in more)],
    )


def test_a_long_text_is_encoded_piece_by_piece(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(write_words(tmp_path / "words.gguf"))
    text = "one two three\nfour " * 1000
    whole = tokenizer.encode(text)
    encode, encoded = SentencePieces.encode, []
    monkeypatch.setattr("gguf_io.tokenizer.tokenizer._PIECE", 100)
    monkeypatch.setattr(SentencePieces, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    interrupted(5, tokenizer.encode, text)
    assert 0 < len(encoded) <= 5
    assert all(100 <= len(piece) < 110 for piece in encoded)
    assert tokenizer.encode(text) == whole


def test_pieces_are_not_cut_inside_a_token_that_spans_words(tmp_path):
    for more, may_cut in ((["\u2581ab"], True), (["a\u2581b"], False), (["\na"], False)):
        tokenizer = load_tokenizer(write_words(tmp_path / "words.gguf", *more))
        assert (tokenizer.encoder.cuts is not None) is may_cut


def test_a_text_that_cannot_be_cut_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("gguf_io.tokenizer.tokenizer._PIECE", 100)
    monkeypatch.setattr("gguf_io.tokenizer.tokenizer._LONGEST_PIECE", 1000)
    tokenizer = load_tokenizer(write_words(tmp_path / "words.gguf"))
    words = "one two " * 20
    assert tokenizer.encode(words + "x" * 900)
    with pytest.raises(TokenizerError, match=r"from character 10\d on it has 1,1\d\d without .* into lines of words"):
        tokenizer.encode("one two " * 13 + "x" * 1100)
    whole = load_tokenizer(write_words(tmp_path / "across.gguf", "a\u2581b"))
    assert whole.encode("one two " * 100)
    with pytest.raises(TokenizerError, match="at most 1,000"):
        whole.encode("one two " * 200)
