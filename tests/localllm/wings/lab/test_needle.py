"""Needle in a haystack: the texts, what counts as found, the picture, and the command."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from localllm.cli.main import main
from localllm.wings.lab.needle import QUESTION, RESERVED, Cell, haystack, picture, search


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("length", [300, 1000])
def test_the_needle_appears_once_at_its_depth(length: int) -> None:
    for depth in (0, 25, 50, 100):
        text, number = haystack(length, depth, 3, words)
        assert text.count(number) == 1 and text.count("lighthouse") == 1
        assert length - RESERVED - 20 < words(text) <= length - RESERVED
        sentences = re.findall(r"[^.]+\.", text)
        place = next(at for at, sentence in enumerate(sentences) if "lighthouse" in sentence)
        assert place == round((len(sentences) - 1) * depth / 100)
        assert len({*sentences}) == len(sentences)


def test_trials_differ_and_can_be_repeated() -> None:
    assert haystack(400, 50, 1, words) == haystack(400, 50, 1, words)
    assert haystack(400, 50, 1, words) != haystack(400, 50, 2, words)


def test_only_the_needles_number_counts() -> None:
    def ask(prompt: str) -> str:
        assert prompt.endswith(QUESTION)
        number = re.search(r"lighthouse is (\d+)", prompt)
        assert number is not None
        deep = prompt.index("lighthouse is") > len(prompt) / 2
        return "It is 7." if deep else f"It is {number[1]}."

    cells = list(search([300, 600], [0, 100], 2, words, ask))
    assert cells == [Cell(300, 0, 2, 2), Cell(300, 100, 2, 0), Cell(600, 0, 2, 2), Cell(600, 100, 2, 0)]


def test_the_picture_shows_each_place() -> None:
    drawn = picture("A & B", [Cell(512, 0, 4, 4), Cell(512, 50, 4, 1), Cell(1024, 0, 4, 0), Cell(1024, 50, 4, 2)])
    texts = [one.text for one in ElementTree.fromstring(drawn).iter() if one.tag.endswith("text")]
    assert {"A & B", "4/4", "1/4", "0/4", "2/4", "512", "1,024", "0 %", "50 %"} <= {*texts}


def test_the_command_asks_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "needle.svg"
    arguments = ["builtin", "--lengths", "300", "--depths", "0,100", "--svg", str(svg), "--json"]
    monkeypatch.setattr("sys.argv", ["localllm", "measure", "needle", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    cells = json.loads(capsys.readouterr().out)
    assert [(cell["length"], cell["depth"], cell["trials"]) for cell in cells] == [(300, 0, 1), (300, 100, 1)]
    assert svg.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--lengths", "10"], "--lengths"), (["--depths", "0,101"], "--depths")]
)
def test_wrong_numbers_are_refused(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["localllm", "needle", "builtin", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and told in capsys.readouterr().err
