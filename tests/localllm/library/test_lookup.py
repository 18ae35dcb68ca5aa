import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.cli.main import main
from localllm.library import resolve
from localllm.library.entry import Source
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.lookup import find, users_models
from localllm.server.catalog import Catalog
from localllm.settings import Settings
from tests.localllm.library.conftest import write_file, write_hugging_face_model, write_ollama_model
from tests.models.encoders import ENCODERS
from tests.models.synthetic import write
from tests.systems import needs_links

SETTINGS = Settings()


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Every file's size, time and content, to check that nothing changes."""
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("name", "source", "end"),
    [
        ("qwen3:0.6b", Source.OLLAMA, "blobs/sha256-"),
        ("QWEN3:0.6B", Source.OLLAMA, "blobs/sha256-"),
        ("registry.ollama.ai/library/qwen3:0.6b", Source.OLLAMA, "blobs/sha256-"),
        ("hf.co/bartowski/Tiny-GGUF:Q8_0", Source.OLLAMA, "blobs/sha256-"),
        ("hf.co/user/Some-Model-GGUF:Q4_K_M", Source.HUGGING_FACE, "Some-Model-Q4_K_M.gguf"),
        ("hf.co/user/some-model-gguf:q8_0", Source.HUGGING_FACE, "Some-Model-Q8_0.gguf"),
        ("huggingface.co/user/Some-Model-GGUF:Q8_0", Source.HUGGING_FACE, "Some-Model-Q8_0.gguf"),
        ("hf.co/user/Some-Model-GGUF", Source.HUGGING_FACE, "Some-Model-Q4_K_M.gguf"),
        (
            "https://huggingface.co/user/Some-Model-GGUF/resolve/main/Some-Model-Q8_0.gguf",
            Source.HUGGING_FACE,
            "Q8_0.gguf",
        ),
        ("Some-Model-Q8_0", Source.HUGGING_FACE, "Some-Model-Q8_0.gguf"),
        ("lmstudio-community/Phi-GGUF", Source.LM_STUDIO, "Phi-Q6_K.gguf"),
        ("hf.co/lmstudio-community/Phi-GGUF:Q6_K", Source.LM_STUDIO, "Phi-Q6_K.gguf"),
        ("hf.co/ggml-org/gemma-GGUF:Q4_0", Source.LLAMA_CPP, "ggml-org_gemma-GGUF_gemma-Q4_0.gguf"),
    ],
)
def test_names_find_models_of_other_programs(full_home: Path, name: str, source: Source, end: str) -> None:
    model = find(name, SETTINGS)
    assert model.source == source
    assert end in model.path.as_posix()
    assert model.path.is_file()


def test_every_shown_name_is_found(full_home: Path) -> None:
    models = list(users_models(SETTINGS))
    assert len(models) == 6
    for model in models:
        assert find(model.name, SETTINGS).path == model.path


def test_manifest_layers_are_read(full_home: Path) -> None:
    defaults = find("qwen3:0.6b", SETTINGS).defaults()
    assert defaults.system == "Speak like a pirate."
    assert defaults.parameters == {"temperature": 0.5, "stop": ["x"]}
    assert defaults.template is None


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3:8b", "bartowski/Tiny-GGUF", "nothing", "hf.co/user/Some-Model-GGUF:Q5_0"]
)
def test_names_of_nothing_say_how_to_get_it(full_home: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="localllm pull"):
        find(name, SETTINGS)


def test_a_similar_name_is_suggested(full_home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean qwen3:0\.6b"):
        find("qwen3:0.6", SETTINGS)


def test_paths_come_first(full_home: Path, tiny_gguf: bytes) -> None:
    write_file(full_home / "qwen3:0.6b", tiny_gguf)
    assert resolve("qwen3:0.6b") == Path("qwen3:0.6b")
    assert resolve("~/x") == full_home / "x"
    assert resolve("missing.gguf") == Path("missing.gguf")


def test_sources_are_asked_in_order(home: Path, tiny_gguf: bytes) -> None:
    write_file(home / ".lmstudio/models/u/r/m-Q8_0.gguf", tiny_gguf)
    assert find("hf.co/u/r:Q8_0", SETTINGS).source is Source.LM_STUDIO
    write_hugging_face_model(home / "huggingface/hub", "u/r", "m-Q8_0.gguf", tiny_gguf)
    assert find("hf.co/u/r:Q8_0", SETTINGS).source is Source.HUGGING_FACE
    write_ollama_model(home / ".ollama/models", "hf.co/u/r/Q8_0", {"model": tiny_gguf})
    assert find("hf.co/u/r:Q8_0", SETTINGS).source is Source.OLLAMA
    write_ollama_model(home / "localllm/models", "hf.co/u/r/Q8_0", {"model": tiny_gguf})
    assert find("hf.co/u/r:Q8_0", SETTINGS).source is Source.OWN


def test_variables_and_settings_lead_elsewhere(home: Path, tiny_gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ollama_model(home / "o", "registry.ollama.ai/library/a/1", {"model": tiny_gguf})
    write_hugging_face_model(home / "h" / "hub", "u/r", "b-Q8_0.gguf", tiny_gguf)
    write_file(home / "lm/models/p/q/c-Q8_0.gguf", tiny_gguf)
    write_file(home / ".lmstudio-home-pointer", f"{home}/lm\n".encode())
    write_file(home / "l/d.gguf", tiny_gguf)
    write_file(home / "f1/deep/er/e.gguf", tiny_gguf)
    write_file(home / "f2/f-00001-of-00002.gguf", tiny_gguf)
    write_file(home / "f2/f-00002-of-00002.gguf", tiny_gguf)
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "o"))
    monkeypatch.setenv("HF_HOME", str(home / "h"))
    monkeypatch.setenv("LLAMA_CACHE", str(home / "l"))
    settings = Settings(model_folders=f"{home}/f1{os.pathsep}{home}/f2", model_store=str(home / "own"))
    write_ollama_model(home / "own", "registry.ollama.ai/library/g/1", {"model": tiny_gguf})
    names = {model.name for model in users_models(settings)}
    assert names == {"g:1", "a:1", "hf.co/u/r:Q8_0", "p/q:Q8_0", "d", "e", "f"}
    assert find("f", settings).path.name == "f-00001-of-00002.gguf"


def test_two_files_of_one_quantisation_keep_their_whole_names(home: Path, tiny_gguf: bytes) -> None:
    hub = home / "huggingface/hub"
    for file in ("small-Q8_0.gguf", "large-Q8_0.gguf"):
        write_hugging_face_model(hub, "u/r", file, tiny_gguf)
    assert {model.name for model in users_models(SETTINGS)} == {"hf.co/u/r:small-Q8_0", "hf.co/u/r:large-Q8_0"}


def test_a_quantisation_may_be_in_the_folders_name(home: Path, tiny_gguf: bytes) -> None:
    for kind in ("Q4_K_M", "Q8_0"):
        write_hugging_face_model(home / "huggingface/hub", "u/r", f"{kind}/model.gguf", tiny_gguf + kind.encode())
        write_file(home / f".lmstudio/models/p/q/{kind}/model.gguf", tiny_gguf)
    names = {"hf.co/u/r:Q4_K_M", "hf.co/u/r:Q8_0", "p/q:Q4_K_M", "p/q:Q8_0"}
    assert {model.name for model in users_models(SETTINGS)} == names
    assert find("hf.co/u/r:Q8_0", SETTINGS).path.read_bytes().endswith(b"Q8_0")


def test_a_damaged_lm_studio_pointer_does_not_hide_other_models(full_home: Path) -> None:
    write_file(full_home / ".lmstudio-home-pointer", b"/home/x\0y")
    assert len(list(users_models(SETTINGS))) == 6


@needs_links
def test_linked_folders_of_manifests_are_followed(full_home: Path) -> None:
    manifests = full_home / ".ollama/models/manifests"
    (manifests / "registry.ollama.ai").rename(full_home / "moved")
    (manifests / "registry.ollama.ai").symlink_to(full_home / "moved")
    assert find("qwen3:0.6b", SETTINGS).source is Source.OLLAMA


def test_damaged_manifests_do_not_hide_other_models(
    full_home: Path, tiny_gguf: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ollama = full_home / ".ollama/models"
    before = len(list(users_models(SETTINGS)))
    layers = [("sha256:../../x", 1), ("sha256:" + "A" * 64, 1), ("sha256:" + "0" * 64, -1), ("sha256:" + "0" * 64, "1")]
    media_type = "application/vnd.ollama.image.model"
    bad = [b"", b"{", b"[]", b'{"layers": 3}', b"\xff", b"[" * 100_000, b'{"layers": [1]}', b" " * (2 << 20)]
    for digest, size in layers:
        layer = {"mediaType": media_type, "digest": digest, "size": size}
        bad.append(json.dumps({"layers": [layer]}).encode())
    for number, data in enumerate(bad):
        write_file(ollama / f"manifests/registry.ollama.ai/library/bad/{number}", data)
    assert len(list(users_models(SETTINGS))) == before
    assert len(caplog.records) == len(bad)
    assert all("bad" in record.getMessage() for record in caplog.records)


def test_a_manifest_of_another_program_cannot_link_to_a_file(home: Path, tiny_gguf: bytes) -> None:
    target = write_file(home / "secret.gguf", tiny_gguf)
    manifest = {"layers": [{"mediaType": "application/vnd.localllm.link", "path": str(target)}]}
    for store in (".ollama/models", "localllm/models"):
        write_file(home / store / "manifests/registry.ollama.ai/library/x/1", json.dumps(manifest).encode())
    assert [(model.source, model.path) for model in users_models(SETTINGS)] == [(Source.OWN, target)]


def test_a_manifest_without_its_blobs_is_not_a_model(home: Path, tiny_gguf: bytes) -> None:
    write_ollama_model(home / ".ollama/models", "registry.ollama.ai/library/x/1", {"model": tiny_gguf})
    for blob in (home / ".ollama/models/blobs").iterdir():
        blob.unlink()
    assert list(users_models(SETTINGS)) == []


def test_a_layer_that_is_not_json_is_named(home: Path, tiny_gguf: bytes) -> None:
    layers = {"model": tiny_gguf, "params": b"{"}
    write_ollama_model(home / ".ollama/models", "registry.ollama.ai/library/x/1", layers)
    with pytest.raises(LibraryError, match="x:1: its params layer"):
        find("x:1", SETTINGS).defaults()


def test_list_shows_all_and_changes_nothing(
    full_home: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write_file(full_home / ".lmstudio/models/a/b/broken-Q8_0.gguf", b"GGUF but not really, just some text")
    before = snapshot(full_home)
    assert command("list", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 8  # including the built-in one
    qwen = rows["qwen3:0.6b"]
    size = Path(qwen["path"]).stat().st_size
    shown = {key: qwen[key] for key in ("source", "size", "quantization", "parameters", "context", "fits", "problem")}
    assert shown == {
        "source": "ollama",
        "size": size,
        "quantization": "Q8_0",
        "parameters": 16 * 32 + 40 * 32,
        "context": 64,
        "fits": True,
        "problem": None,
    }
    assert str(broken) in rows["a/b:Q8_0"]["problem"]
    assert command("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "NAME",
        "SIZE",
        "QUANTISATION",
        "PARAMETERS",
        "CONTEXT",
        "SOURCE",
        "MEMORY",
        "FITS",
        "TOK/S",
    ]
    assert len(lines) == 9
    assert snapshot(full_home) == before


def test_list_shows_embedding_models(
    full_home: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """They store no keys and values."""
    folder = full_home / ".lmstudio/models/a/bert"
    folder.mkdir(parents=True)
    write(ENCODERS["bert"], folder / "bert-F32.gguf")
    assert command("list", "--json") == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["architecture"] == "bert")
    assert row["fits"] is True and row["memory"] > 0 and row["problem"] is None


def test_show_takes_names_and_tells_what_the_manifest_adds(
    full_home: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("show", "qwen3:0.6b") == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny: llama")
    assert "temperature  0.5" in out
    assert out.endswith("\nSystem\nSpeak like a pirate.\n")
    assert command("show", "qwen3:0.6b", "--json") == 0
    assert json.loads(capsys.readouterr().out)["defaults"]["system"] == "Speak like a pirate."


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("params", b'{"stop": 5}'),
        ("params", b'{"temperature": {}}'),
        ("params", b"[" * 100_000),
        ("params", b'{"top_k": ' + b"9" * 400 + b"}"),
        ("messages", b'[{"role": 1}]'),
        ("messages", b"[" * 100_000),
        ("system", b"\xff"),
        ("system", b"x" * (1 << 20) + b"x"),
        ("template", b"{{" * 500_000),
        ("template", b"nothing that is known"),
    ],
)
def test_one_bad_manifest_hides_no_other_model(
    full_home: Path,
    tiny_gguf: bytes,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    kind: str,
    data: bytes,
) -> None:
    store = full_home / ".ollama/models"
    write_ollama_model(store, "registry.ollama.ai/library/bad/latest", {"model": tiny_gguf, kind: data})
    names = {entry.name for entry in Catalog([], SETTINGS).entries()}
    assert {"qwen3:0.6b", "bad:latest", "builtin"} <= names
    assert command("list") == 0
    capsys.readouterr()
    assert command("run", "bad", "hi") == 2
    err = capsys.readouterr().err
    assert "defect" not in err and len(err) < 2000, err[:2000]


def test_without_models_the_user_learns_what_to_do(
    home: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("list") == 0
    assert "localllm pull" in capsys.readouterr().err
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "show", "rm", "verify"])
def test_a_shell_completes_names(
    full_home: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": f"localllm {command} q", "COMP_CWORD": "-1"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["localllm"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.split() == ["qwen3:0.6b"]


def test_what_no_registry_can_have_is_not_said_to_be_pulled(
    full_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, advice in (("a b", "`localllm list` shows the ones there are."), ("folder", "choose a .gguf file in it")):
        with pytest.raises(ModelNotFoundError) as told:
            find(name, SETTINGS)
        assert advice in str(told.value) and "localllm pull" not in str(told.value)
