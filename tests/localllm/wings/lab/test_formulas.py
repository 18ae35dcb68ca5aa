"""The formulas against cases computed by hand, and against published figures that were checked or corrected."""

import math

import pytest

from localllm.wings.lab.formulas import memory, money, serving, speculation, speed
from localllm.wings.lab.formulas.hardware import HARDWARE

GIB = 2**30


def test_weights() -> None:
    assert memory.weight_bytes(8e9, 16) == 16e9
    assert memory.weight_bytes(7e9, 4.5) == 3.9375e9


def test_keys_and_values_of_llama_3_70b() -> None:
    per_token = memory.kv_bytes_per_token(layers=80, kv_heads=8, head_size=128)
    assert per_token == 327_680
    # A textbook has 1,073,741,824 for 4096 tokens.
    assert memory.kv_bytes(per_token, 4096) == 1_342_177_280
    # Another has "about 10 GB" for 32 sequences of 32K, which is what each one takes.
    assert memory.kv_bytes(per_token, 32_768) == 10 * GIB
    assert memory.kv_bytes(per_token, 32_768, sequences=32) == 320 * GIB
    # And "19.5 GB" for a million tokens.
    assert memory.kv_bytes(per_token, 10**6) / GIB == pytest.approx(305.18, abs=0.01)


def test_keys_and_values_in_8_bits_and_latent() -> None:
    # 34 bytes hold 32 values.
    assert memory.kv_bytes_per_token(28, 8, 128, 34 / 32) == 2 * 28 * 8 * 34 * 4
    # DeepSeek-V3: 61 layers, latents of 512 and 64 rotated values.
    assert memory.latent_kv_bytes_per_token(61, 512, 64) == 70_272


def test_windows_bound_keys_and_values() -> None:
    # Of four layers three see 100 tokens; 1000 tokens: 1000 / 4 + 3 * 100 / 4.
    assert memory.kv_bytes(8, 1000, window=100, windowed_share=0.75) == 8 * (250 + 75)
    assert memory.kv_bytes(8, 50, window=100, windowed_share=0.75) == 8 * 50
    with pytest.raises(ValueError, match="windowed_share is 2"):
        memory.kv_bytes(8, 50, window=100, windowed_share=2)


def test_sequences_that_fit() -> None:
    assert memory.sequences_that_fit(24e9, 16e9, 1e9) == 8
    assert memory.sequences_that_fit(24e9, 16e9, 1e9, reserve=0.5e9) == 7
    assert memory.sequences_that_fit(10e9, 16e9, 1e9) == 0
    with pytest.raises(ValueError, match="per_sequence is 0"):
        memory.sequences_that_fit(10e9, 1e9, 0)


def test_bandwidth_of_processors() -> None:
    assert speed.memory_bandwidth(2, 3200e6) == 51.2e9


def test_roofline() -> None:
    # An A100: 312 TFLOPS, 2.039 TB/s.
    assert speed.ridge(312e12, 2.039e12) == pytest.approx(153, abs=0.1)
    assert speed.attainable(1, 312e12, 2e12) == 2e12
    assert speed.attainable(1000, 312e12, 2e12) == 312e12


def test_a_step_reads_the_weights_once_for_all_sequences() -> None:
    # 16 GB at 1 TB/s: 16 ms, whatever a cheat sheet's second factor of 2 says.
    assert speed.step_seconds(1, 16e9, 0, 16e9, 100e12, 1e12) == 0.016
    assert speed.tokens_per_second(1, 16e9, 0, 16e9, 100e12, 1e12) == 62.5
    # 10 sequences with 0.4 GB each: 20 GB, 20 ms for ten tokens.
    assert speed.step_seconds(10, 16e9, 0.4e9, 16e9, 100e12, 1e12) == 0.02
    assert speed.tokens_per_second(10, 16e9, 0.4e9, 16e9, 100e12, 1e12) == 500
    # 1000 sequences without keys and values: 1.6e13 operations, 160 ms; arithmetic limits.
    assert speed.step_seconds(1000, 16e9, 0, 16e9, 100e12, 1e12) == 0.16
    assert speed.throughput_limit(0.4e9, 1e12) == 2500


def test_at_the_critical_batch_both_limits_meet() -> None:
    batch = speed.critical_batch(312e12, 2.039e12, bytes_per_weight=2)
    assert batch == pytest.approx(153, abs=0.1)
    parameters = 8e9
    assert 2 * batch * parameters / 312e12 == pytest.approx(2 * parameters / 2.039e12)


def test_operations_and_prefill() -> None:
    assert speed.operations_per_token(8e9) == 16e9
    # 32 layers of 32 heads of 128: 524,288 operations for each token attended to.
    assert speed.operations_per_token(8e9, 32, 32, 128, tokens=1000) == 16e9 + 524_288_000
    assert speed.prefill_seconds(1000, 16e9, 32e12) == 0.5
    assert speed.prefill_seconds(1000, 16e9, 32e12, used=0.5) == 1


def test_experts_that_a_batch_reads() -> None:
    assert speed.experts_read(8, 2, 1) == 2
    # Each of 8 is missed by a token with probability 3/4, by two with 9/16.
    assert speed.experts_read(8, 2, 2) == 3.5
    assert speed.experts_read(128, 8, 10_000) == pytest.approx(128)


@pytest.mark.parametrize(
    ("alpha", "gamma", "tokens"), [(0, 4, 1), (1, 4, 5), (0.5, 1, 1.5), (0.5, 3, 1.875), (0.8, 4, 3.3616)]
)
def test_tokens_of_a_speculated_step(alpha: float, gamma: int, tokens: float) -> None:
    assert speculation.expected_tokens(alpha, gamma) == pytest.approx(tokens)
    assert speculation.expected_tokens(alpha, gamma) == pytest.approx(sum(alpha**i for i in range(gamma + 1)))


def test_speculation_has_limits() -> None:
    with pytest.raises(ValueError, match=r"alpha is 1\.5"):
        speculation.expected_tokens(1.5, 2)
    # 3.3616 tokens for a step and four drafts of a tenth.
    assert speculation.speedup(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)
    # A cheat sheet's alpha / (1 - alpha^(k+1)) would be 1.19 here.
    assert speculation.speedup(0.8, 4, 0) == pytest.approx(3.3616)
    # Drafts that are always wrong only cost.
    assert speculation.speedup(0, 4, 0.1) == pytest.approx(1 / 1.4)


def test_acceptance_is_the_overlap() -> None:
    assert speculation.acceptance([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]) == pytest.approx(0.7)
    assert speculation.acceptance([1, 0], [1, 0]) == 1
    with pytest.raises(ValueError, match="zip"):
        speculation.acceptance([1], [0.5, 0.5])


def test_queues() -> None:
    assert serving.utilisation(2, 0.4) == 0.8
    # M/M/1 at 80 %: the wait is 4 times the service; M/D/1: half of that.
    assert serving.wait_seconds(2, 0.4) == pytest.approx(1.6)
    assert serving.wait_seconds(2, 0.4, variation=0) == pytest.approx(0.8)
    assert serving.wait_seconds(3, 0.4) == math.inf


def test_several_devices() -> None:
    # Four devices: six messages of a quarter each.
    assert serving.ring_allreduce_seconds(4e9, 4, 1e9) == 6
    assert serving.ring_allreduce_seconds(4e9, 1, 1e9) == 0
    # 80 layers, 8192 wide, one token: 160 sums of 16,384 bytes; on two devices each takes two messages of half.
    alone = 160 * 2 * (8192 / 50e9 + 5e-6)
    assert serving.tensor_parallel_seconds(0.1, 2, 80, 1, 8192, 50e9, 5e-6) == pytest.approx(0.05 + alone)


def test_energy() -> None:
    assert money.kwh(250, 4) == 1


def test_price_of_an_api() -> None:
    assert money.api_price(2e6, 1e6, 0.5, 1.5) == 2.5
    assert money.api_price(2e6, 1e6, 0.5, 1.5, cached_tokens=1e6, cached_price=0.05) == pytest.approx(2.05)
    assert money.api_price(2e6, 1e6, 0.5, 1.5, cached_tokens=1e6) == 2.5


def test_hardware_figures_are_of_a_kind() -> None:
    names = [machine.name for machine in HARDWARE]
    assert len(set(names)) == len(names)
    ridges = {each.name: speed.ridge(each.f16_peak, each.bandwidth) for each in HARDWARE if each.f16_peak}
    assert ridges["H100"] == pytest.approx(295, abs=0.3)
    assert all(50 < ridge < 500 for ridge in ridges.values()), ridges
    for machine in HARDWARE:
        assert 50e9 < machine.bandwidth < 10e12, machine.name
