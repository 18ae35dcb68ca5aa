# ruff: noqa: RUF001 - look-alike characters are what these patterns are about
r"""How text is cut before byte-pair merging, by the value of `tokenizer.ggml.pre`.

llama.cpp is the reference for names and cuts, even where it departs from a model's own tokenizer: it does not tell
upper from lower case outside ASCII, its \d matches no other digits and its CJK ranges no spaces. The syntax is that of
Oniguruma, in which && intersects classes and \z is the end of the text.
"""

import re
from dataclasses import dataclass

from gguf_io.errors import TokenizerError, shortened

# Characters that are letters in every Unicode version: Latin, Greek, Cyrillic, Hebrew, Arabic, kana, Chinese, Korean.
LETTERS = "A-Za-zÀ-ÖØ-öø-ƺΑ-ΡΣ-ώА-яא-תء-غف-يぁ-ゖァ-ヺ一-龥가-힣"
_LINE_END = rf"\S\n(?=[{LETTERS}])"
BETWEEN_LINES = re.compile(_LINE_END)
BEFORE_SPACES = re.compile("[A-Za-z](?= [A-Za-z])")
BETWEEN_WORDS = re.compile(f"{BEFORE_SPACES.pattern}|{_LINE_END}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text.

    patterns: applied in turn; each splits every piece left by the one before into its matches and the text between.
    ignore_merges: a piece that is a token of the vocabulary stays whole, whatever the merges say.
    add_bos: whether to begin with BOS if the file does not say.
    byte_level: tokens are spelled in GPT-2's byte alphabet; otherwise in plain text, with U+2581 for spaces and <0xNN>
        for the bytes of other characters.
    whole_newlines: a run of newlines that is a token stays whole.
    cuts: see Encoder.cuts.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True
    whole_newlines: bool = False
    cuts: re.Pattern[str] | None = BETWEEN_WORDS


# Not (?i:...): Oniguruma would fold U+017F, the long s, into it.
_CONTRACTION = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATH_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_UPPER_MARKS, _LOWER_MARKS = r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_LINES = r"[^\n]+|\n+"
_SENTENCE = r" ?[^(\s|.,!?…。，、।۔،)]+"
_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_IDEOGRAPHS = r"[一-龥ࠀ-一가-퟿&&\S]+"
# Groups of three digits counted from the right, the first group together with the text before it. In linear time: split
# into numbers with the text before them, then off the part before the last whole groups, then into the groups.
_THREES_FROM_THE_RIGHT = (
    r"\P{N}*+\p{N}+|\P{N}+",
    r"\A\P{N}*+\p{N}{1,3}(?=(?:\p{N}{3})*+\z)",
    r"\G\p{N}{3}",
)
_HAN = "[一-鿿㐀-䶿\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f]"

# The cased letters of the Unicode version that deepseek-llm was trained with.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _camel(upper: str, lower: str, suffix: str) -> str:
    """A word with at most one change from capitals to small letters, and what may follow it."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"


_DIGIT_GPT2 = (r"\p{N}", _GPT2)
_OPTIONAL = f"(?:{_CONTRACTION})?"
_GPT4O = rf"{_camel(_UPPER, _LOWER, _OPTIONAL)}|\p{{N}}{{1,3}}|{_PATH_SIGNS}|{_SPACES}"
_DEEPSEEK3 = (r"\p{N}{1,3}", _KANA, rf"{_PUNCTUATED}[\r\n]*|{_SPACES}")

_ROWS: list[tuple[str, PreTokenizer]] = [
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais exaone4 trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer(_DIGIT_GPT2)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan grok-2 solar-open "
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer((_QWEN2,)),
    ),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
            )
        ),
    ),
    ("laguna", PreTokenizer((_LINES, _QWEN2))),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",))),
    (
        "seed-coder",
        PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|{_SPACES}",
            ),
            cuts=BETWEEN_LINES,
        ),
    ),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}"), ignore_merges=True),
    ),
    (
        "jais-2",
        PreTokenizer(
            (
                # The look-behind keeps each piece of a long run of spaces from being searched for a newline.
                rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|(?<![^\S\r\n])\s*[\r\n]+"
                r"|\s{512}(?!\S)|\s{256}(?!\S)"
                r"|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s",
            )
        ),
    ),
    (
        "falcon",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED}]+",
                r"\s?[!-/:-~！-／：-～‘-‟、。]+",
                r"(?<!\s)\s++\z",
                _IDEOGRAPHS,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3)),
    (
        "spark2_5",
        PreTokenizer((r"\p{N}{1,3}", _KANA, rf"{_PUNCTUATED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_KANA}",
                rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_OPTIONAL}|\p{{N}}|{_PATH_SIGNS}|{_SPACES}",
            ),
            ignore_merges=True,
        ),
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_SENTENCE,))),
    ("viking", PreTokenizer((_SENTENCE, r"\p{N}"))),
    (
        "tekken",
        PreTokenizer(
            (rf"{_camel(_UPPER, _LOWER, '')}|\p{{N}}|{_PATH_SIGNS}|{_SPACES}",), ignore_merges=True, add_bos=True
        ),
    ),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    (
        "granite-embed-multi-97m",
        PreTokenizer(
            (rf"{_camel(_UPPER_MARKS, _LOWER_MARKS, _OPTIONAL)}|\p{{N}}{{1,3}}|{_PATH_SIGNS}|{_SPACES}",),
            ignore_merges=True,
        ),
    ),
    (
        "tiny_aya cohere2moe",
        PreTokenizer(
            (
                *_THREES_FROM_THE_RIGHT,
                rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_OPTIONAL}|\p{{N}}{{1,3}}|{_PATH_SIGNS}|{_SPACES}",
            )
        ),
    ),
    (
        "kimi-k2",
        PreTokenizer(
            (rf"{_HAN}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_OPTIONAL}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",)
        ),
    ),
    # llama.cpp's pattern has no bound, and is quadratic in the length of a number.
    ("superbpe", PreTokenizer((r"\p{N}+", "(?=([0-9]{3}){1,100}(?![0-9]))"), cuts=None)),
    (
        "afmoe",
        PreTokenizer(
            (
                *_THREES_FROM_THE_RIGHT,
                "[一-鿿㐀-䶿\u8c48-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f"
                "\uaa60-\uaa7f\ua9e0-\ua9ff가-\ud7afᄀ-ᇿ]+",
                rf"{_PUNCTUATED}[\r\n]*|{_SPACES}",
            )
        ),
    ),
    (
        "gemma4 granite-embed-multi-311m",
        PreTokenizer((_LINES,), add_bos=True, byte_level=False, whole_newlines=True, cuts=BETWEEN_LINES),
    ),
    ("sarvam-moe", PreTokenizer((_LINES,), byte_level=False, cuts=BETWEEN_LINES)),
]

PRE_TOKENIZERS = {name: row for names, row in _ROWS for name in names.split()}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The row for a value of `tokenizer.ggml.pre`. Raises TokenizerError naming the value if it is unknown."""
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre is '{shortened(name)}', which this version does not know. "
            "Update localllm, or convert the model again with one of: " + ", ".join(sorted(PRE_TOKENIZERS)) + "."
        )
    return PRE_TOKENIZERS[name]
