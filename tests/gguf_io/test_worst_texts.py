"""Text from files and clients on which a careless loop or regular expression takes quadratic time.

Each case gets a megabyte, or as many items, in its own process with a time limit that linear work stays far below and
quadratic work far exceeds.
"""

import pytest

from tests.forking import Nursery

PARTITION = """
from gguf_io.tokenizer.tokenizer import Partition
tokens = {" " * k: k for k in range(2, 32)} | {"\\n" * k: 100 + k for k in range(2, 32)}
tokens |= {f"<|reserved_{k}|>": 200 + k for k in range(500)} | {"<s>": 1, "</s>": 2}
partition = Partition(tokens, {1, 5}, {2, 6})
text = TEXT
assert "".join(part if isinstance(part, str) else "" for part in partition.split(text)) is not None
partition.ranges(text)
sum(1 for _ in partition.split(text, [(at, at + 1) for at in range(0, len(text), 8)]))
"""
PRE_TOKENIZER = """
from tokenizers import Regex, pre_tokenizers
from gguf_io.tokenizer.pretokenizers import PRE_TOKENIZERS
cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[NAME].patterns]
pre_tokenizers.Sequence(cuts).pre_tokenize_str(TEXT)
"""
FAMILY = """
from gguf_io.chat_template.defaults import INSTRUCT, PLAIN, family_of
assert family_of((), "llama2" * 200_000) is family_of((), "mistral " * 120_000) is PLAIN
assert family_of((), "Llama-2-7b-Chat") is family_of((), "Mixtral 8x7B Instruct") is INSTRUCT
assert family_of((), "chat llama2") is PLAIN
"""
CALLS = """
from gguf_io.chat_template.messages import normalised
count = 100_000
calls = [{"id": str(k), "function": {"name": "f"}} for k in range(count)]
results = [{"role": "tool", "tool_call_id": str(k), "content": ""} for k in reversed(range(count))]
messages = normalised([{"role": "assistant", "tool_calls": calls}, *results], True)
assert [message["name"] for message in messages[1:]] == ["f"] * count
"""
NEIGHBOURS = """
from gguf_io.chat_template.messages import _without_system, milder_forms
text = "x" * 100
users = [{"role": "user", "content": text} for _ in range(100_000)]
(joined,) = next(milder_forms(users))
assert joined["content"] == "\\n\\n".join([text] * 100_000)
(told,) = _without_system([{"role": "system", "content": text} for _ in range(100_000)])
assert told == {**joined, "role": "user"}
"""
WORDS = """
from gguf_io.tokenizer.word_pieces import WordPieces
class Vocabulary:
    ids = {"\\u2581a": 0, "a": 1, "b" * 1_000_000: 2}
    never_text = frozenset()
    metadata = __import__("gguf_io.metadata").metadata.Metadata("x", {})
    def need_unk_id(self): return 3
assert WordPieces(Vocabulary()).encode("a" * 1_000_000) == [3]
assert len(WordPieces(Vocabulary()).encode(("a" * 100 + " ") * 10_000)) == 1_000_000
"""
MARKERS = """
from gguf_io.chat_template.capabilities import find_markers
assert find_markers("<think>" * 150_000) == ()
"""

TEXTS = {
    "spaces": "' ' * 1_000_000",
    "newlines": "'\\n' * 1_000_000",
    "table rows": "('| x' + ' ' * 37 + '|\\n') * 12_000",
    "pairs of tokens": "'<s></s>' * 140_000",
    "beginnings of tokens": "'<|reserved_1' * 80_000",
    "brackets": "'<' * 1_000_000",
}
CUTS = {
    "spaces before digits": "' ' * 500_000 + '1' * 500_000",
    "spaces before a letter": "' ' * 1_000_000 + 'x'",
    "digits": "'1' * 1_000_000",
    "letters with case": "'aA' * 500_000",
    "wide spaces": "'\\u3000' * 1_000_000 + '1'",
}
PRES = ["llama-bpe", "deepseek-llm", "jais-2", "gpt-4o"]

CASES = {f"partition: {name}": PARTITION.replace("TEXT", text) for name, text in TEXTS.items()}
CASES |= {
    f"{pre}: {name}": PRE_TOKENIZER.replace("TEXT", text).replace("NAME", repr(pre))
    for pre in PRES
    for name, text in CUTS.items()
}
CASES |= {"family": FAMILY, "calls": CALLS, "neighbours": NEIGHBOURS, "words": WORDS, "markers": MARKERS}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_megabyte_of_the_worst_text_takes_no_time_by_the_square(case: str, children: Nursery) -> None:
    process = children.start(CASES[case])
    try:
        _, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, err.decode()
