"""The planner's decisions: nothing overflows, everything that fits is used, and the sums add up."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_io.errors import LocalLLMError
from gguf_io.model_file import ModelFile, open_model
from gpu_offload.devices import Device, DeviceKind
from gpu_offload.errors import DeviceRequestError
from gpu_offload.estimate import Estimate
from gpu_offload.known_gpus import KNOWN_GPUS, imagined_gpu
from gpu_offload.memory import FileSizes
from gpu_offload.options import LlamaOptions, Use
from localllm.placement import llama
from localllm.placement.llama import DEFAULT_RESERVE, LlamaRequest, plan
from localllm.placement.placement import Placement
from tests.gpu_offload import sparse_models

GIB = 2**30
RAM = 64 * GIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


def opened(folder: Path, name: str) -> ModelFile:
    path = folder / f"{name}.gguf"
    return open_model(path if path.exists() else sparse_models.write(getattr(sparse_models, name), path))


@pytest.fixture(scope="module")
def dense(folder) -> ModelFile:
    return opened(folder, "LLAMA_8B")


@pytest.fixture(scope="module")
def mixture(folder) -> ModelFile:
    return opened(folder, "QWEN3_30B_A3B")


def gpu(gib: float, name: str = "") -> Device:
    label = f"{gib} GiB"
    return Device(name or label, label, "CUDA", DeviceKind.GPU, int(gib * GIB), int(gib * GIB))


def gpu_bytes(found: Placement) -> list[int]:
    return [use.needed for use in found.uses[1:]]


def test_a_large_gpu_takes_everything_with_the_longest_context(dense):
    found = plan(dense, [gpu(24)], RAM)
    assert found.fits
    assert (found.layers, found.options.gpu_layers) == (33, 33)
    assert (found.options.context_tokens, found.options.type_k, found.options.type_v) == (32768, "f16", "f16")
    assert found.options.cpu_expert_layers == 0


@pytest.mark.parametrize(
    ("gib", "context", "kv_type"), [(24, 32768, "f16"), (7.5, 16384, "f16"), (6.4, 8192, "f16"), (6, 8192, "q8_0")]
)
def test_a_smaller_gpu_shortens_context_and_keys_before_it_gives_up_layers(dense, gib, context, kv_type):
    found = plan(dense, [gpu(gib)], RAM)
    assert found.fits
    assert found.options.gpu_layers == 33
    assert (found.options.context_tokens, found.options.type_k, found.options.type_v) == (context, kv_type, kv_type)


def test_without_a_gpu_everything_is_in_main_memory(dense):
    found = plan(dense, [], RAM)
    assert found.fits
    assert found.options.gpu_layers == 0
    (use,) = found.uses
    assert use.weights == sum(tensor.nbytes for tensor in dense.tensors.values())
    assert use.other == use.kv // 2  # copies of prefixes beside the cells
    assert plan(dense, [gpu(24)], RAM).uses[0].other == 0


@settings(max_examples=60)
@given(gib=st.floats(1.0, 12.0), context=st.sampled_from([None, 2048, 16384]))
def test_no_gpu_overflows_and_no_layer_that_fits_is_left_out(dense, gib, context):
    request = LlamaRequest(context_tokens=context)
    found = plan(dense, [gpu(gib)], RAM, request)
    if found.options.gpu_layers == 0:
        assert found.uses[1].needed == 0
    else:
        assert found.uses[1].needed <= gib * GIB - DEFAULT_RESERVE
    if found.options.gpu_layers < found.layers:
        more = replace(
            request,
            context_tokens=found.options.context_tokens,
            kv_types=("f16", "f16"),
            gpu_layers=found.options.gpu_layers + 1,
        )
        assert not plan(dense, [gpu(gib)], RAM, more).fits


@settings(max_examples=30)
@given(gib=st.floats(4.0, 24.0))
def test_a_mixture_gives_up_no_more_experts_than_it_must(mixture, gib):
    found = plan(mixture, [gpu(gib)], RAM)
    assert found.uses[1].fits
    kept = found.options.cpu_expert_layers
    if found.options.gpu_layers < found.layers:
        assert kept == found.layers - 1
    elif kept:
        less = LlamaRequest(context_tokens=4096, kv_types=("f16", "f16"), gpu_layers=found.layers, n_cpu_moe=kept - 1)
        assert not plan(mixture, [gpu(gib)], RAM, less).fits


def test_a_mixture_on_eight_gigabytes_keeps_its_attention_there(mixture):
    found = plan(mixture, [gpu(8)], RAM)
    assert found.fits
    assert found.options.gpu_layers == found.layers
    assert 0 < found.options.cpu_expert_layers < found.layers
    assert any("experts of the first" in note for note in found.notes)


@pytest.mark.parametrize("sizes", [(8, 8), (4, 12), (6, 2, 6), (12, 12)])
@pytest.mark.parametrize("name", ["LLAMA_8B", "QWEN3_30B_A3B", "GEMMA3_27B"])
def test_several_gpus_share_the_layers_and_none_overflows(folder, name, sizes):
    with opened(folder, name) as model:
        found = plan(model, [gpu(size) for size in sizes], RAM)
        weights = sum(tensor.nbytes for tensor in model.tensors.values())
        copied = 0 if "output.weight" in model.tensors else model.tensors["token_embd.weight"].nbytes
    assert all(use.fits for use in found.uses[1:] if use.needed)
    assert found.options.split_mode == "none" or sum(found.options.tensor_split) == found.options.gpu_layers
    total = sum(use.weights for use in found.uses)
    assert total == weights + (copied if found.options.gpu_layers else 0)


def test_two_gpus_hold_more_than_one(dense):
    request = LlamaRequest(context_tokens=8192)
    one = plan(dense, [gpu(4)], RAM, request)
    two = plan(dense, [gpu(4), gpu(4)], RAM, request)
    assert one.options.gpu_layers < two.options.gpu_layers


def test_one_gpu_is_enough_where_the_model_fits_on_the_roomiest(dense):
    found = plan(dense, [gpu(12), gpu(24), gpu(16)], RAM)
    assert (found.options.split_mode, found.options.main_gpu, found.options.tensor_split) == ("none", 1, ())
    assert found.notes[0] == "33 of 33 layers (the output is one) on 24 GiB"


def test_companions_are_placed_with_the_model(dense):
    found = plan(dense, [gpu(12), gpu(24)], RAM, LlamaRequest(projector_bytes=GIB))
    assert (found.options.main_gpu, [use.other for use in found.uses]) == (1, [0, 0, GIB])


def test_rows_are_split_in_proportion_to_free_memory(dense):
    request = LlamaRequest(context_tokens=4096, base=LlamaOptions(split_mode="row", main_gpu=1))
    found = plan(dense, [gpu(5), gpu(9)], RAM, request)
    first, second = found.uses[1:]
    assert found.options.tensor_split == pytest.approx((4 / 12, 8 / 12))
    assert second.weights == pytest.approx(2 * first.weights, rel=1e-6)
    stored = 4096 * 32 * 128 * 2 * 2  # per head: cells, layers, head length, K and V, float16
    assert (first.kv, second.kv) == (3 * stored, 6 * stored)  # for 8 heads, each share rounded up
    assert first.compute == second.compute > 0


def test_a_context_is_doubled_only_where_that_fits(dense):
    request = LlamaRequest(context_tokens=8192, spare=True)
    assert plan(dense, [gpu(24)], RAM, request).options.context_tokens == 16384
    tight = plan(dense, [gpu(6.4)], RAM, request)
    assert (tight.options.context_tokens, tight.options.type_k, tight.options.gpu_layers) == (8192, "f16", 33)
    assert plan(dense, [gpu(3)], RAM, request).options.context_tokens == 8192


def test_settings_about_gpus_are_refused_where_there_is_none(dense):
    with pytest.raises(DeviceRequestError, match="split_mode set, but llama"):
        plan(dense, [], RAM, LlamaRequest(about_gpus=("split_mode",)))
    with pytest.raises(DeviceRequestError, match="gpu_layers is 7"):
        plan(dense, [], RAM, LlamaRequest(gpu_layers=7, about_gpus=("main_gpu",)))


def test_notes_tell_what_a_wish_comes_to(dense, mixture):
    asked = LlamaRequest(n_cpu_moe=200)
    assert "n_cpu_moe changes nothing: the model has no experts" in plan(dense, [gpu(24)], RAM, asked).notes
    assert plan(dense, [gpu(24)], RAM, asked).uses == plan(dense, [gpu(24)], RAM).uses
    assert "the experts of the first 48 layers stay in main memory" in plan(mixture, [gpu(24)], RAM, asked).notes
    assert plan(dense, [gpu(1)], RAM).notes[0] == "all layers in main memory: none fits on a GPU"
    none = plan(dense, [gpu(24)], RAM, LlamaRequest(gpu_layers=0))
    assert none.notes[0] == "all layers in main memory: gpu_layers is 0"


def test_what_was_asked_for_is_planned_even_if_it_does_not_fit(dense):
    found = plan(dense, [gpu(4)], RAM, LlamaRequest(context_tokens=8192, kv_types=("q8_0", None), gpu_layers=33))
    options = found.options
    assert (options.gpu_layers, options.context_tokens, options.type_k, options.type_v) == (33, 8192, "q8_0", "f16")
    assert not found.fits
    assert any("lacks" in note for note in found.notes)


def test_too_little_main_memory_is_reported(dense):
    found = plan(dense, [], 2 * GIB)
    assert not found.fits
    assert any(note.startswith("main memory lacks") for note in found.notes)


def test_without_a_gpu_a_projector_is_in_main_memory(dense):
    without, beside = (plan(dense, [], RAM, LlamaRequest(projector_bytes=size)) for size in (0, GIB))
    assert beside.uses[0].needed - without.uses[0].needed == GIB


def test_drafts_and_projectors_take_their_part(folder, dense):
    request = LlamaRequest(context_tokens=4096)
    alone = plan(dense, [gpu(24)], RAM, request)
    with opened(folder, "QWEN3_06B") as draft:
        size = sum(tensor.nbytes for tensor in draft.tensors.values())
        beside = plan(draft, [gpu(24)], RAM, request)
        both = plan(dense, [gpu(24)], RAM, replace(request, draft=beside, projector_bytes=GIB))
    assert gpu_bytes(both)[0] - gpu_bytes(alone)[0] == GIB + gpu_bytes(beside)[0] > GIB + size


def test_a_type_that_does_not_fit_the_heads_is_refused(folder):
    path = sparse_models.write(replace(sparse_models.TINY_QWEN3, head_length=80), folder / "odd.gguf")
    with (
        open_model(path) as model,
        pytest.raises(ValueError, match="heads of 80 numbers do not fit q8_0, which stores 32"),
    ):
        plan(model, [], RAM, LlamaRequest(kv_types=("q8_0", "q8_0")))


def test_the_table_has_a_row_a_place_and_adds_up(dense):
    found = plan(dense, [gpu(6)], RAM)
    head, *rows = found.rows()
    assert [row[0] for row in rows] == ["main memory", "6 GiB"]
    assert all(len(row) == len(head) for row in rows)
    for row in rows:
        *parts, needed = (int(cell.replace(",", "")) for cell in row[1:6])
        assert needed == pytest.approx(sum(parts), abs=2)


class Report:
    """Reported sizes in place of llama.cpp's: the estimates, plus something on GPUs that hold layers."""

    def __init__(self, more: int, *names: str) -> None:
        self.more = more
        self.names = names
        self.asked: list[LlamaOptions] = []

    def __call__(self, model: ModelFile, options: LlamaOptions) -> dict[str, Use]:
        self.asked.append(options)
        units = options.gpu_layers or 0
        counts = tuple(map(int, options.tensor_split)) or (units,)
        estimate = Estimate(FileSizes(model), options, counts)
        found, start = {"": estimate.in_main_memory()}, estimate.first
        for name, count in zip(self.names, counts, strict=True):
            guess = estimate.on_gpu(start, start + count)
            found[name] = replace(guess, compute=guess.compute + self.more) if count else guess
            start += count
        return found


@pytest.mark.parametrize("more", [-(2**28), 0, 2**28, 2**30])
@pytest.mark.parametrize("gib", [3, 6, 7.5, 24])
def test_llama_cpps_figures_correct_the_estimates(dense, monkeypatch, more, gib):
    report = Report(more, "CUDA0")
    monkeypatch.setattr(llama, "dry_run", report)
    found = plan(dense, [gpu(gib, "CUDA0")], RAM, LlamaRequest(dry_run=True))
    assert found.measured and "sizes reported by llama.cpp" in found.notes
    assert found.fits
    if found.options.gpu_layers:
        assert found.uses[1] == replace(found.uses[1], compute=report(dense, found.options)["CUDA0"].compute)
    # What the estimates would have chosen with that much more or less room.
    expected = plan(dense, [gpu(gib - more / GIB)], RAM).options
    assert found.options == expected
    assert len(report.asked) <= llama._DRY_RUNS + 1


def test_figures_for_several_gpus_move_layers_between_them(dense, monkeypatch):
    report = Report(2**29, "CUDA0", "CUDA1")
    monkeypatch.setattr(llama, "dry_run", report)
    found = plan(dense, [gpu(3.5, "CUDA0"), gpu(3.5, "CUDA1")], RAM, LlamaRequest(context_tokens=4096, dry_run=True))
    assert found.measured and found.fits
    assert found.options.gpu_layers == sum(found.options.tensor_split) < 33
    expected = plan(dense, [gpu(3), gpu(3)], RAM, LlamaRequest(context_tokens=4096))
    assert found.options == expected.options


def test_without_figures_of_these_devices_the_estimates_hold(dense, monkeypatch):
    for report in (lambda *_: {}, Report(0, "CUDA7")):
        monkeypatch.setattr(llama, "dry_run", report)
        found = plan(dense, [gpu(24, "CUDA0")], RAM, LlamaRequest(dry_run=True))
        assert not found.measured and "sizes estimated from the file's header" in found.notes
        assert found.uses == plan(dense, [gpu(24)], RAM).uses


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("RTX 4090", "RTX 4090", 24),
        ("nvidia geforce rtx4090", "RTX 4090", 24),
        ("a100 80gb", "A100 80GB", 80),
        ("8GiB", "GPU of 8GiB", 8),
        ("512 MiB", "GPU of 512 MiB", 0.5),
        ("7.5G", "GPU of 7.5G", 7.5),
    ],
)
def test_gpus_that_are_not_here(text, name, gib):
    found = imagined_gpu(text)
    assert (found.label, found.backend) == (name, "")
    assert 0.95 * gib * GIB <= found.free_bytes == found.total_bytes <= gib * GIB


def test_every_known_gpu_is_found_by_its_name():
    assert all(imagined_gpu(known.name).label == known.name for known in KNOWN_GPUS)


def test_an_unknown_gpu_names_the_nearest():
    with pytest.raises(LocalLLMError, match="RTX 4090"):
        imagined_gpu("RTX 4095")


@pytest.mark.parametrize("text", ["", "8", "???", "9" * 400 + "GiB"])
def test_an_unknown_name_gets_the_whole_list(text):
    with pytest.raises(LocalLLMError, match=r"like 8GiB, or one of: GTX 1080 Ti, .*RTX 3070, .*Instinct MI300X"):
        imagined_gpu(text)
