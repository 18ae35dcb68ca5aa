"""Which backend computes a model, and why."""

from dataclasses import replace
from pathlib import Path

import pytest

from cpu_kernels.compile_children import KernelError
from gguf_io import ModelFile, open_model
from gpu_offload import devices
from gpu_offload.devices import Device, DeviceKind
from gpu_offload.errors import DeviceRequestError, LlamaCppMissingError
from localllm import advice
from localllm.errors import OutOfMemoryError, RequestError
from localllm.placement.backends import choose_backend, open_placed, open_runner, place, plan_request
from localllm.placement.companions import for_draft
from localllm.placement.loaded_model import load_model
from localllm.placement.memory import RESERVE_BYTES, trained_context
from localllm.settings import Settings
from models.errors import UnsupportedModelError
from models.needs import native_needs
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.oracle import llama_oracle

GPU = Device("CUDA0", "A fast GPU", "CUDA", DeviceKind.GPU, 2**33, 2**33)


@pytest.fixture
def known(tmp_path: Path) -> ModelFile:
    return open_model(write(MODELS["llama"], tmp_path / "known.gguf"))


@pytest.fixture
def foreign(tmp_path: Path) -> ModelFile:
    path = write(MODELS["llama"], tmp_path / "foreign.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"lambo"))
    return open_model(path)


def see(monkeypatch: pytest.MonkeyPatch, *found: Device) -> None:
    """Make llama.cpp see these GPUs."""
    monkeypatch.setattr(devices, "gpus", lambda: list(found))


def miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make llama.cpp appear not installed."""

    def fail() -> list[Device]:
        raise LlamaCppMissingError("the test says so")

    monkeypatch.setattr(devices, "gpus", fail)


def test_without_a_gpu_the_native_engine_takes_what_it_knows(
    known: ModelFile, foreign: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch)
    assert str(choose_backend(known, Settings())) == "native: llama.cpp sees no GPU"
    choice = choose_backend(foreign, Settings())
    assert choice.backend == "llama" and "'lambo'" in choice.reason


def test_a_gpu_takes_everything_unless_it_is_to_have_no_layers(
    known: ModelFile, foreign: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, GPU)
    assert str(choose_backend(known, Settings())) == "llama.cpp: there is a GPU, A fast GPU"
    assert str(choose_backend(known, Settings(gpu_layers=0))) == "native: gpu_layers is 0"
    assert choose_backend(foreign, Settings(gpu_layers=0)).backend == "llama"
    assert choose_backend(known, Settings(backend="native")).reason == "chosen by the backend setting"


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_llama_cpp_is_taken_where_only_that_fits(known: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch)
    large = replace(native_needs(known), weights=2**33)
    monkeypatch.setattr("models.needs.native_needs", lambda *_, **_more: large)
    choice = choose_backend(known, Settings(), 4 * 2**30)
    assert choice.backend == "llama" and "only llama.cpp fits" in choice.reason
    assert choose_backend(known, Settings(backend="native"), 4 * 2**30).backend == "native"
    # If nothing fits, nothing is read, and both figures are reported.
    monkeypatch.setattr(ModelFile, "data", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(OutOfMemoryError, match=r"weights +8,192 MiB(.|\n)*llama.cpp would need \d+ MiB"):
        open_placed(known, place(known, Settings(), room=2**20))


def test_types_of_keys_and_values_that_only_llama_cpp_knows_go_to_it(
    known: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch)
    assert choose_backend(known, Settings(kv_type_k="q8_0")).backend == "native"
    choice = choose_backend(known, Settings(kv_type_k="q5_0"))
    assert choice.backend == "llama" and "cannot store keys as 'q5_0'" in choice.reason
    miss(monkeypatch)
    assert choose_backend(known, Settings(kv_type_k="q5_0")).backend == "native"


def test_without_llama_cpp_only_wishes_that_it_alone_could_follow_fail(
    known: ModelFile, foreign: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    miss(monkeypatch)
    assert str(choose_backend(known, Settings())) == "native: llama.cpp is not available: the test says so"
    with pytest.raises(UnsupportedModelError, match="lambo"):
        choose_backend(foreign, Settings())
    with pytest.raises(LlamaCppMissingError, match="pip install"):
        choose_backend(known, Settings(gpu_layers=3))


def test_wishes_about_devices_need_llama_cpp(known: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, GPU)
    assert choose_backend(known, Settings(n_cpu_moe=2)).reason == "n_cpu_moe set"
    with pytest.raises(RequestError, match="cannot use gpu_layers, split_mode"):
        choose_backend(known, Settings(backend="native", gpu_layers=3, split_mode="row"))


def test_the_settings_become_a_request_to_the_planner(known: ModelFile) -> None:
    settings = Settings(ctx=512, gpu_layers=7, main_gpu=1, n_cpu_moe=3, threads=2)
    request = plan_request(known, settings)
    assert (request.context_tokens, request.spare, request.gpu_layers, request.n_cpu_moe) == (512, True, 7, 3)
    assert request.about_gpus == ("main_gpu",)
    assert (request.base.main_gpu, request.base.split_mode, request.base.threads) == (1, "none", 2)
    assert plan_request(known, Settings()).base.split_mode == "layer"
    assert plan_request(known, Settings(main_gpu=1, split_mode="row")).base.split_mode == "row"


def test_more_context_than_the_model_was_trained_for_is_lowered_with_a_warning(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = data_dir / "models/gguf/stories260K-F32.gguf"
    settings = Settings(backend="native", ctx=5000, kv_mib=16, threads=1, disk_cache=False)
    with open_model(path) as file:
        trained = trained_context(file)
        assert plan_request(file, settings).context_tokens == trained < 5000
        least = place(file, replace(settings, ctx=trained), room=2**33)
        assert place(file, settings, room=2**33) == replace(least, settings=settings)
        told = f"{file.name} was trained for {trained:,} tokens of context; the limit of 5,000 is lowered to that"
    with load_model(path, settings) as loaded:
        assert loaded.engine.context == trained
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [told]


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_llama_cpp_reports_where_the_model_is(data_dir: Path) -> None:
    with open_model(data_dir / "models/gguf/stories260K-F32.gguf") as file:
        runner, choice = open_runner(file, Settings(backend="llama", ctx=128, threads=1), None)
        runner.close()
        assert any("layers" in note for note in choice.notes)
        if devices.gpus():
            assert choice.device_bytes > 0
        else:
            assert choice.device_bytes == 0
            with pytest.raises(DeviceRequestError, match="gpu_layers is 3"):
                open_runner(file, Settings(gpu_layers=3), None)


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("error", [UnsupportedModelError, KernelError])
def test_what_the_native_engine_turns_out_not_to_compute_goes_to_llama_cpp(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error("its rope is of another kind.", remedy="Use --backend llama.")

    monkeypatch.setattr("models.native_runner.NativeRunner", refuse)
    see(monkeypatch)
    with open_model(data_dir / "models/gguf/stories260K-F32.gguf") as file:
        runner, choice = open_runner(file, Settings(ctx=128, threads=1), None)
        runner.close()
        assert runner.info.backend == choice.name == "llama.cpp"
        assert "its rope is of another kind" in choice.why
        (told,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert told == (
            "stories260K-F32.gguf: the native engine cannot: its rope is of another kind. "
            "llama.cpp computes it instead."
        )
        with pytest.raises(UnsupportedModelError):
            open_runner(file, Settings(backend="native"), None)


def test_keys_and_values_are_stored_as_the_settings_say(tmp_path: Path) -> None:
    known = open_model(write(MODELS["llama-multi-query"], tmp_path / "known.gguf"))
    for settings, types in (
        (Settings(backend="native", kv_mib=16), ("f16", "f16")),
        (Settings(backend="native", kv_mib=16, kv_type_v="q8_0"), ("f16", "q8_0")),
        (Settings(backend="native", kv_mib=16, kv_type_k="q4_0", kv_type_v="q4_0"), ("q4_0", "q4_0")),
    ):
        runner, _ = open_runner(known, settings, None)
        per_value = {"f16": 2 * 32 + 4, "q8_0": 32 + 2, "q4_0": 16 + 2}
        assert runner.info.kv_layout.endswith(":".join(types).replace("f16", "i16"))
        assert runner.info.kv_bytes_per_token == 2 * sum(per_value[kind] for kind in types)  # layers
        runner.close()
    request = plan_request(known, Settings(kv_type_k="q8_0"))
    assert request.kv_types == ("q8_0", None)
    assert plan_request(known, for_draft(Settings(kv_type_k="q8_0"))).kv_types == (None, None)


ODD = replace(MODELS["llama"], head=80, extra={"rope.dimension_count": 80})


def test_the_budget_counts_heads_as_they_are_stored(tmp_path: Path) -> None:
    with open_model(write(ODD, tmp_path / "odd.gguf")) as file:
        settings = Settings(backend="native", kv_mib=4)
        per_token = native_needs(file).kv_per_token
        assert per_token == ODD.layers * ODD.kv_heads * 2 * (
            96 * 2 + 4
        )  # 80 values take three times 32 of two bytes, and a scale
        for runner, tokens in (
            (open_runner(file, settings, None)[0], 4 * 2**20 // per_token),
            (open_runner(file, settings, None, kv_tokens=1024)[0], 1024),
        ):
            assert runner.info.kv_bytes_per_token == per_token
            assert runner.info.pages_total == tokens // runner.info.page_size
            runner.close()


def test_a_pool_of_some_tokens_has_room_for_states_beside_them(tmp_path: Path) -> None:
    with open_model(write(MODELS["qwen35"], tmp_path / "qwen35.gguf")) as file:
        settings = Settings(backend="native", kv_mib=64)
        assert 64 * 2**20 // 8 < native_needs(file).states(64 * 2**20) <= 64 * 2**20 // 4
        for tokens in (512, 1024, 100_000):
            runner = open_runner(file, settings, None, kv_tokens=tokens)[0]
            assert tokens <= runner.info.pages_total * runner.info.page_size <= 1.5 * tokens + 16
            runner.close()


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_advice_promises_the_context_that_a_load_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(backend="native", threads=1)
    with open_model(write(replace(MODELS[name], context=2**20), tmp_path / "model.gguf")) as file:
        needs = native_needs(file, threads=1)
        room = RESERVE_BYTES + needs.weights + needs.buffers + 100 * 2**20
        monkeypatch.setattr(advice, "available_memory", lambda: room)
        longest = advice.advise(file, settings).longest_context
        assert 0 <= place(file, settings, room=room).tokens - longest < advice.CONTEXT_STEP
        told = advice.advise(file, replace(settings, ctx=longest)).placement
        assert told.fits
        kv_mib = -(-told.uses[0].kv >> 20)
        assert place(file, replace(settings, ctx=longest, kv_mib=kv_mib), room=room + 2**20).tokens >= longest


def test_heads_that_do_not_fit_a_type_are_refused(tmp_path: Path) -> None:
    with (
        open_model(write(ODD, tmp_path / "odd.gguf")) as file,
        pytest.raises(RequestError, match=r"odd\.gguf: heads of 80"),
    ):
        open_runner(file, Settings(backend="native", kv_type_k="q8_0", kv_mib=16), None)
