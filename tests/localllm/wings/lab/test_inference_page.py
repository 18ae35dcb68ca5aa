"""docs/inference.md: its examples give the results shown, and its tables match the functions."""

import doctest
import re
from pathlib import Path

from localllm.wings.lab import formulas
from localllm.wings.lab.formulas import memory, money, serving, speculation, speed
from localllm.wings.lab.formulas.hardware import AS_OF, HARDWARE

PAGE = Path(__file__).resolve().parents[4] / "docs" / "inference.md"
TEXT = PAGE.read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table with this heading, without its head."""
    lines = TEXT[TEXT.index(f"| {heading} |") :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_examples() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 30
    assert result.failed == 0


def test_the_table_of_accepted_tokens() -> None:
    for alpha, *cells in rows("\N{GREEK SMALL LETTER ALPHA}"):
        expected = [f"{speculation.expected_tokens(float(alpha), gamma):.2f}" for gamma in (1, 2, 3, 4, 6, 8)]
        assert cells == expected


def test_the_table_of_hardware() -> None:
    weights = memory.weight_bytes(8.03e9, 4.9)
    found = rows("machine")
    assert len(found) == len(HARDWARE)
    for cells, machine in zip(found, HARDWARE, strict=True):
        assert cells == [
            machine.name,
            str(machine.memory_gb or "-"),
            f"{machine.bandwidth / 1e9:g}",
            "-" if machine.f16_peak is None else f"{machine.f16_peak / 1e12:g}",
            "-" if machine.f16_peak is None else f"{speed.ridge(machine.f16_peak, machine.bandwidth):.0f}",
            str(machine.watts or "-"),
            f"{machine.bandwidth / weights:.0f}",
        ]
    assert f"(read {AS_OF})" in TEXT


def test_every_function_is_on_the_page() -> None:
    for module in (memory, money, serving, speculation, speed):
        short = module.__name__.removeprefix(f"{formulas.__name__}.")
        functions = {
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
        named = set(re.findall(rf"\b{short}\.(?!md\b)(\w+)", TEXT))
        assert functions == named & functions, f"{short}: {functions - named}"
        assert named <= functions, f"{short}: {named - functions}"
