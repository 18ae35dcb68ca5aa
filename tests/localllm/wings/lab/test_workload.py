"""Requests from shapes, traces and prompt files, and the text made up for them."""

import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from localllm.errors import RequestError
from localllm.wings.lab.workload.requests import Block, Lengths, RequestShape, WorkloadRequest, poisson
from localllm.wings.lab.workload.texts import TokenRatio, read_prompts, text_of, words
from localllm.wings.lab.workload.traces import read_trace, scaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2000, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(text: str, name: str = "file") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return written


def test_azures_trace(write: Callable[..., Path]) -> None:
    first, second = read_trace(write(AZURE))
    assert (first.at, first.prompt_tokens, first.answer_tokens) == (0.0, 374, 44)
    assert second.at == pytest.approx(4.314579, abs=1e-5)
    assert first.blocks[0].identity != second.blocks[0].identity


def test_mooncakes_trace_shares_blocks(write: Callable[..., Path]) -> None:
    first, second = read_trace(write(MOONCAKE))
    assert [block.tokens for block in first.blocks] == [512, 512, 76]
    assert first.blocks[0] == second.blocks[0]
    assert (first.prompt_tokens, second.prompt_tokens, second.at, second.answer_tokens) == (1100, 600, 0.5, 7)


def test_the_beginning_of_a_trace(write: Callable[..., Path]) -> None:
    assert len(read_trace(write(AZURE), most=1)) == 1


def test_traces_are_scaled(write: Callable[..., Path]) -> None:
    first, second = scaled(read_trace(write(MOONCAKE)), shorter=4, faster=5)
    assert [block.tokens for block in first.blocks] == [128, 128, 19]
    assert (second.at, first.answer_tokens, second.answer_tokens) == (0.1, 1, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "file is not a trace"),
        ("a,b\n1,2\n", "file is not a trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "file has no requests"),
        (AZURE + "2023-11-16 18:16:00,many,3\n", "line 4: not a request"),
        (AZURE + "2023-11-16 18:16:00,0,3\n", "line 4: not a request"),
        (AZURE + "2022-11-16 18:16:00,5,3\n", "line 4: the request is earlier"),
        (MOONCAKE + '{"timestamp": 3000}\n', "line 3: not a request"),
        (
            MOONCAKE + '{"timestamp": 3000, "input_length": 0, "output_length": 1, "hash_ids": []}\n',
            "line 3: not a request",
        ),
        (
            MOONCAKE + '{"timestamp": 3000, "input_length": 1e999, "output_length": 1, "hash_ids": []}\n',
            "line 3: not a request",
        ),
        (MOONCAKE + "[]\n", "line 3: not a request"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "88 tokens before"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2, 3]}\n', "lengths below 1"),
    ],
)
def test_invalid_traces_are_refused(write: Callable[..., Path], text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_trace(write(text))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for read in (read_trace, read_prompts):
        with pytest.raises(RequestError, match="nowhere: cannot be read: No such file"):
            read(tmp_path / "nowhere")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for read in (read_trace, read_prompts):
        with pytest.raises(RequestError, match="binary: is not UTF-8 text"):
            read(binary)


def test_real_traces(data_dir: Path) -> None:
    azure = read_trace(data_dir / "traces" / "AzureLLMInferenceTrace_conv.csv")
    assert len(azure) == 19_366  # according to its publishers
    mooncake = read_trace(data_dir / "traces" / "mooncake_conversation_trace.jsonl")
    assert len(mooncake) == 12_031
    assert statistics.mean(request.prompt_tokens for request in mooncake) == pytest.approx(12_035, rel=1e-3)
    assert statistics.mean(request.answer_tokens for request in mooncake) == pytest.approx(343, rel=1e-2)


def test_shapes_draw_lengths_and_prefixes() -> None:
    shape = RequestShape(Lengths(20, 30), Lengths(5, 5), shared=8, groups=3)
    requests = shape.requests(200, "a seed")
    assert {request.answer_tokens for request in requests} == {5}
    assert {request.prompt_tokens for request in requests} == set(range(20, 31))
    assert {request.blocks[0] for request in requests} == {Block(f"shared {group}", 8) for group in range(3)}
    assert len({request.blocks[1].identity for request in requests}) == 200
    assert shape.requests(200, "a seed") == requests != shape.requests(200, "another seed")


def test_lengths_are_read() -> None:
    assert Lengths.parse("64", "--prompt-tokens") == Lengths(64, 64)
    assert Lengths.parse("64:128", "--prompt-tokens") == Lengths(64, 128)
    for text in ("", "0", "9:3", "a", "1:", ":1", "1:2:3", "-4"):
        with pytest.raises(RequestError, match="--prompt-tokens is"):
            Lengths.parse(text, "--prompt-tokens")


def test_a_prefix_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="shared prefix of 20 tokens leaves nothing"):
        RequestShape(Lengths(20, 30), Lengths(1, 1), shared=20)


def test_poisson_arrivals() -> None:
    placed = poisson([WorkloadRequest(0.0, (), 1)] * 5001, rate=4, seed="s")
    gaps = [later.at - earlier.at for earlier, later in pairwise(placed)]
    assert placed[0].at == 0
    # Exponential gaps: mean and standard deviation are both 1 / rate.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert poisson(placed, 4, "s") == placed


def test_the_ratio_of_tokens_to_words() -> None:
    ratio = TokenRatio.between((20, 40), (100, 160))
    assert (ratio.tokens_per_word, ratio.overhead) == (1.5, 10)
    with pytest.raises(ValueError, match="100 words are 40 tokens"):
        TokenRatio.between((20, 40), (100, 40))


def test_text_has_the_wanted_tokens_and_shares_what_blocks_share() -> None:
    ratio = TokenRatio(1.5, 10)
    first, second = (WorkloadRequest(0.0, (Block("shared", 30), Block(own, 40)), 1) for own in ("a", "b"))
    # 30 / 1.5 words, and (40 - 10) / 1.5.
    texts = [text_of(request, ratio, "seed").split() for request in (first, second)]
    assert [len(text) for text in texts] == [40, 40]
    assert texts[0][:20] == texts[1][:20]
    assert texts[0][20:] != texts[1][20:]
    assert text_of(first, ratio, "other seed").split()[:20] != texts[0][:20]
    assert len(text_of(WorkloadRequest(0.0, (Block("a", 2),), 1), ratio, "seed").split()) == 1
    assert len(words(7, "x").split()) == 7


def test_prompts_of_a_file(write: Callable[..., Path]) -> None:
    assert read_prompts(write("one\n\ntwo \n", "prompts.txt")) == ["one", "two "]
    messages = [{"role": "user", "content": "hi"}]
    lines = '{"prompt": "one"}\n{"messages": [{"role": "user", "content": "hi"}]}\n{"turns": ["first", "second"]}\n'
    assert read_prompts(write(lines, "prompts.jsonl")) == ["one", messages, "first"]


def test_only_newlines_separate_prompts(write: Callable[..., Path]) -> None:
    assert read_prompts(write("\ufeffone\u2028still one\ftoo\r\ntwo\r\n", "prompts.txt")) == [
        "one\u2028still one\ftoo",
        "two",
    ]
    assert read_prompts(write('\ufeff{"prompt": "a\u2028b"}\n', "prompts.jsonl")) == ["a\u2028b"]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": 3}', '{"messages": []}', '{"messages": ["x"]}', '{"turns": [1]}']
)
def test_invalid_prompts_are_refused(write: Callable[..., Path], line: str) -> None:
    with pytest.raises(RequestError, match=r"prompts\.jsonl, line 2"):
        read_prompts(write('{"prompt": "one"}\n' + line, "prompts.jsonl"))
    with pytest.raises(RequestError, match="has no prompts"):
        read_prompts(write("\n \n"))
