"""`plan --explain`: figures computed by hand, and the formula shown evaluates to the figure beside it."""

import json
import re
from pathlib import Path

import pytest

from gguf_io import open_model
from gpu_offload.options import Use
from localllm.cli.main import main
from localllm.speed.expected import ExpectedSpeed
from localllm.speed.kept import KeptLimits
from localllm.speed.work import work_in_header
from localllm.wings.lab.explain import Explained, Explanation, machine_here, machine_named
from localllm.wings.lab.simulate.machines import Machine
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write

GB, TERA = 1e9, 1e12
MACHINE = Machine("here", 10 * GB, 1 * TERA, 8 * GB)
USE = Use("main memory", weights=10**8, kv=1 << 20, compute=10**7, other=0, reserve=10**8, available=10**9)
FORMULAS = Path(__file__).resolve().parents[4].joinpath("docs/inference.md").read_text(encoding="utf-8")


def explained(tmp_path: Path, model: str, context: int = 256, **changed: object) -> Explanation:
    given = {"kv_types": ("f16", "f16"), "machine": MACHINE, "expected": None} | changed
    with open_model(write(MODELS[model], tmp_path / f"{model}.gguf")) as file:
        return Explanation.of(file, USE, context, **given)  # type: ignore[arg-type]


def by_name(explanation: Explanation) -> dict[str, Explained]:
    return {each.name: each for each in (*explanation.memory, *explanation.speed)}


def evaluated(each: Explained) -> float:
    """The value of the formula shown, by Python."""
    names = re.sub(r"\{(\w+)\}", r"\1", each.formula)
    return float(eval(names, {"__builtins__": {}, "max": max}, dict(each.numbers)))


@pytest.mark.parametrize("model", ["llama", "qwen3moe", "deepseek2", "gemma3", "qwen35"])
def test_what_is_shown_is_what_is_computed(tmp_path: Path, model: str) -> None:
    explanation = explained(tmp_path, model)
    assert len(explanation.memory) == 4 and len(explanation.speed) >= 7
    for each in (*explanation.memory, *explanation.speed):
        assert evaluated(each) == pytest.approx(each.value, rel=1e-12), each.name
        assert f"`{each.function}`" in FORMULAS or each.function in FORMULAS, each.function
        names, numbers = str(each).splitlines()[1:]
        assert names.endswith(f"[{each.function}]") and numbers.startswith("  = ")


def test_the_memory_of_a_small_llama(tmp_path: Path) -> None:
    found = by_name(explained(tmp_path, "llama"))
    # 2 layers, 2 KV heads of 64 values, keys and values, two bytes each
    assert found["KV of a token"].value == 2 * 2 * 2 * 64 * 2 == 1024
    assert found["KV of a full context"].value == 1024 * 256
    # a gigabyte without reserve, buffers and weights, divided by 256 KiB
    assert found["full contexts that fit"].value == (10**9 - 10**8 - 10**7 - 10**8) // (1024 * 256) == 3013
    smaller = by_name(explained(tmp_path, "llama", kv_types=("q8_0", "f16")))
    assert smaller["KV of a token"].value == 2 * 2 * 64 * (34 / 32 + 2)


def test_the_roofline_of_a_small_llama(tmp_path: Path) -> None:
    with open_model(write(MODELS["llama"], tmp_path / "llama.gguf")) as file:
        matrices = {name: each for name, each in file.tensors.items() if name != "token_embd.weight"}
        read = sum(each.nbytes for each in matrices.values())
        weights = sum(each.shape[0] * (each.shape[1] if len(each.shape) > 1 else 1) for each in matrices.values())
    explanation = explained(tmp_path, "llama")
    found = by_name(explanation)
    assert found["ridge, above which arithmetic limits"].value == 100
    assert found["operations for a token, empty context"].value == 2 * weights
    # each of the two layers multiplies a query with 256 keys and 256 values: 4 operations per value
    heads = found["operations for a token, full context"].numbers
    assert found["operations for a token, full context"].value == 2 * weights + 4 * 2 * heads["heads"] * 64 * 256
    assert found["decode at most, empty context"].value == pytest.approx(10 * GB / read)
    assert found["decode at most, full context"].value == pytest.approx(10 * GB / (read + 1024 * 256))
    assert found["no batch exceeds, full context"].value == pytest.approx(10 * GB / (1024 * 256))
    rates = {batch: (empty, full) for batch, empty, full in explanation.batches}
    assert rates[1] == pytest.approx((10 * GB / read, 10 * GB / (read + 1024 * 256)))
    critical = found["batch from which on arithmetic limits"].value
    assert critical == pytest.approx(TERA * read / (2 * weights * 10 * GB))
    # below it a larger batch is free; above it arithmetic limits the tokens per second
    assert rates[2][0] == pytest.approx(min(2, critical) * rates[1][0])
    assert rates[64][0] == pytest.approx(min(TERA / (2 * weights), 64 * rates[1][0]))


def test_peaks_of_bytes_and_floats_count_by_the_model_s_products(tmp_path: Path) -> None:
    kept = KeptLimits("a processor", "avx2", 4, "2026-11-01", read=20 * GB, int8=400 * GB, floats=100 * GB)
    with open_model(write(MODELS["llama"], tmp_path / "llama.gguf")) as file:
        work = work_in_header(file)
        machine = machine_here(kept, work, 1 * GB)
    int8, floats = work.row.int8_operations, work.row.float_operations
    assert (int8 + floats) / machine.peak == pytest.approx(int8 / (400 * GB) + floats / (100 * GB))
    assert (machine.bandwidth, machine.memory) == (20 * GB, 1 * GB)
    assert machine_named("NVIDIA GeForce RTX 4090", GB) == Machine("RTX 4090", 1008 * GB, 165 * TERA, GB)
    assert machine_named("RTX 3060", GB) is None  # its maker states no such arithmetic
    assert machine_named("GPU of 8GiB", GB) is None


def test_a_gpu_is_not_taken_for_another_whose_name_begins_alike() -> None:
    for label, name in (("A100 80GB", "A100 80GB"), ("NVIDIA L40S", "L40S"), ("Tesla T4", "T4"), ("NVIDIA A10", "A10")):
        machine = machine_named(label, GB)
        assert machine is not None and machine.name == name
    for label in ("A100 40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA H100 PCIe", "T400 4GB"):
        assert machine_named(label, GB) is None


def test_what_the_formulas_leave_out_is_said(tmp_path: Path) -> None:
    text = str(explained(tmp_path, "llama", machine=None))
    assert "The plan counts 1 MiB of keys and values" in text and "`localllm bench` measures" in text
    assert "Speed at most" not in text
    expected = ExpectedSpeed(decode=100.0, prefill=1000.0, error=0.15, basis="a bench")
    explanation = explained(tmp_path, "llama", expected=expected)
    most = by_name(explanation)["decode at most, empty context"].value
    assert f"Decode is {100 / most:.0%} of what" in str(explanation)


def test_the_command_prints_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(MODELS["llama"], tmp_path / "small.gguf")

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["localllm", "plan", str(path), "--ctx", "256", "--explain", *arguments])
        with pytest.raises(SystemExit):
            main()
        shown = capsys.readouterr()
        return shown.out + shown.err

    assert "= 2 \N{MULTIPLICATION SIGN} 2 \N{MULTIPLICATION SIGN} 2 \N{MULTIPLICATION SIGN} 64" in run()
    made = json.loads(run("--gpu-memory", "RTX 4090", "--json"))["explained"]
    assert made["machine"]["bandwidth"] == 1008e9
    assert [row[0] for row in made["batches"]] == [1, 2, 4, 8, 16, 32, 64]
    assert {"name", "function", "formula", "numbers", "value", "unit"} == made["memory"][0].keys()
    assert "--explain and --all exclude" in run("--all")
