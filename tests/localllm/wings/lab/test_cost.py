"""A server's counters, a processor's energy counters, and receipts computed by hand."""

from pathlib import Path

import pytest

from localllm.errors import RequestError
from localllm.wings.lab.energy import EnergyMeter, EnergyUnknownError
from localllm.wings.lab.served import Prices, Receipt, Tally, Tokens, TokensServed, read_metrics

METRICS = """# HELP localllm_ttft_seconds Submission to first token.
# TYPE localllm_ttft_seconds histogram
localllm_ttft_seconds_count 3.0
localllm_ttft_seconds_sum 0.5
# TYPE localllm_ttft_seconds_created gauge
localllm_ttft_seconds_created 1.7e+09
# TYPE localllm_uptime_seconds gauge
localllm_uptime_seconds 7200.0
# TYPE localllm_prompt_tokens_total counter
localllm_prompt_tokens_total{model="a"} 100.0
localllm_prompt_tokens_total{model="b"} 7.0
# TYPE localllm_generated_tokens_total counter
localllm_generated_tokens_total{model="a"} 40.0
# TYPE localllm_prefix_hit_tokens_total counter
localllm_prefix_hit_tokens_total{model="a",tier="memory"} 20.0
localllm_prefix_hit_tokens_total{model="a",tier="disk"} 5.0
"""


def test_counters_are_added_up_by_model() -> None:
    assert read_metrics(METRICS) == TokensServed({"a": Tokens(100, 25, 40), "b": Tokens(prompt=7)}, 7200)


def test_a_server_that_has_served_nothing() -> None:
    assert read_metrics("localllm_tasks 3.0\n") == TokensServed({}, None)


@pytest.mark.parametrize("text", ["", "vllm:prompt_tokens_total 3\n", "<html></html>\n"])
def test_other_metrics_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="The metrics are not"):
        read_metrics(text)


def test_a_tally_follows_unloaded_and_restarted_models() -> None:
    tally = Tally(TokensServed({"a": Tokens(100, 0, 10)}, None))
    tally.add(TokensServed({"a": Tokens(130, 10, 15)}, None))
    assert tally.models == {"a": Tokens(30, 10, 5)}
    tally.add(TokensServed({}, None))  # unloaded
    tally.add(TokensServed({"a": Tokens(20, 0, 2), "b": Tokens(5, 0, 1)}, None))  # and loaded again
    assert tally.models == {"a": Tokens(50, 10, 7), "b": Tokens(5, 0, 1)}
    tally.add(TokensServed({"a": Tokens(4, 0, 1), "b": Tokens(5, 0, 1)}, None))  # restarted between two readings
    assert tally.models == {"a": Tokens(54, 10, 8), "b": Tokens(5, 0, 1)}


def test_a_receipt() -> None:
    models = {"a": Tokens(3_000_000, 1_000_000, 400_000), "b": Tokens(0, 0, 100_000)}
    receipt = Receipt(models, 7200.0, 7.2e6, Prices(kwh=0.30, prompt=0.10, generated=0.40, cached=0.01))
    assert receipt.total == Tokens(3_000_000, 1_000_000, 500_000)
    assert receipt.kwh == pytest.approx(2)  # 1 kW for two hours
    assert receipt.electricity == pytest.approx(0.60)
    assert receipt.electricity_per_million == pytest.approx(1.20)
    assert receipt.joules_per_token == pytest.approx(14.4)
    assert receipt.api == pytest.approx(2 * 0.10 + 1 * 0.01 + 0.5 * 0.40)


def test_what_is_not_known_is_none() -> None:
    nothing = Receipt({}, 5.0, None, Prices(kwh=1.0))
    assert (nothing.kwh, nothing.electricity, nothing.joules_per_token, nothing.api) == (None,) * 4
    idle = Receipt({}, 5.0, 10.0, Prices(kwh=1.0, prompt=1.0, generated=1.0))
    assert (idle.electricity_per_million, idle.joules_per_token, idle.api) == (None, None, 0.0)
    assert Receipt({}, 5.0, 10.0, Prices()).electricity is None


def zone(root: Path, zone: str, name: str, joules: float, span: int = 10**9) -> Path:
    """A zone as the kernel shows it; span in microjoules."""
    path = root / zone
    path.mkdir(exist_ok=True)
    for file, content in (("name", name), ("energy_uj", round(joules * 1e6)), ("max_energy_range_uj", span - 1)):
        (path / file).write_text(f"{content}\n", encoding="ascii")
    return path


def test_packages_and_memory_are_added_up(tmp_path: Path) -> None:
    for number in range(2):
        zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", 100)
        zone(tmp_path, f"intel-rapl:{number}:0", "core", 50)
        zone(tmp_path, f"intel-rapl:{number}:1", "dram", 10)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 100)
    (tmp_path / "intel-rapl").mkdir()
    meter = EnergyMeter(tmp_path)
    assert meter.joules() == 0
    zone(tmp_path, "intel-rapl:0", "package-0", 103)
    zone(tmp_path, "intel-rapl:1:1", "dram", 11.5)
    zone(tmp_path, "intel-rapl:0:0", "core", 99)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 103)
    assert meter.joules() == pytest.approx(4.5)


def test_the_platforms_counter_has_the_others_in_it(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    zone(tmp_path, "intel-rapl:1", "psys", 1)
    meter = EnergyMeter(tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", 2)
    zone(tmp_path, "intel-rapl:1", "psys", 4)
    assert meter.joules() == pytest.approx(3)


def test_counters_wrap(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 995)
    meter = EnergyMeter(tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", 4)
    assert meter.joules() == pytest.approx(9)
    zone(tmp_path, "intel-rapl:0", "package-0", 3)
    assert meter.joules() == pytest.approx(9 + 999)


def test_without_counters_the_reason_is_said(tmp_path: Path) -> None:
    with pytest.raises(EnergyUnknownError, match="there are no RAPL counters in"):
        EnergyMeter(tmp_path)
    path = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (path / "energy_uj").unlink()
    (path / "energy_uj").mkdir()  # as unreadable as a file that only root may read
    with pytest.raises(EnergyUnknownError, match="energy_uj cannot be read: Is a directory"):
        EnergyMeter(tmp_path)
