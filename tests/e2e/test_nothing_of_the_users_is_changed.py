"""Run every command with all paths in settings and variables leading into folders of someone else's files.

The files have names that localllm itself uses, as far as another program could have chosen them.
"""

import functools
import hashlib
import os
import signal
from pathlib import Path

import pytest

from cpu_kernels.kernel_cache import CACHE_VARIABLE
from tests.forking import PROGRAM, ROOT, Forked, Nursery
from tests.waiting import eventually

pytestmark = pytest.mark.slow

OLD = 10**9  # seconds since the epoch
COMMANDS = [
    "list",
    "show builtin",
    "show {folder}/mine.gguf",
    "plan builtin",
    "config",
    "cache",
    "cache --free kernels --free kv --free images --free packed --free documents",
    "ask {folder} somebody --model builtin --max-tokens 4",
    "ask {folder} --index",
    "doctor",
    "verify",
    "verify --repair",
    "verify {digest} --repair",
    "rm --unfinished",
    "rm mine",
    "rm library/model",
    "cp builtin mine",
    "cp library/model other",
    "create mine --file {folder}/Modelfile",
    "create mine --from {folder}",
    "launch codex --model builtin --port 9",
    "launch cn --model builtin --port 9 --write",
    "warm --request {folder}/notes.txt --model builtin",
    "pull 127.0.0.1:9/library/model",
    "pull http://127.0.0.1:9/mine.gguf",
    "quantize builtin {folder}/mine.gguf --type F16",
    "quantize {folder}/mine.gguf {folder}/new.gguf --type F16",
    "perplexity builtin {folder}/notes.txt",
    "run builtin --file {folder}/notes.txt --max-tokens 4",
    "bench builtin --prompt 4 --tokens 2 --rounds 1",
    "completion bash",
    "ps",
    "stop builtin",
    "chat builtin --sessions {folder}/notes.txt",
    "run builtin hi --lora {folder}/notes.txt",
    "run builtin hi --mmproj {folder}/notes.txt",
    "run builtin hi --image {folder}/notes.txt",
    "serve --port 0",
]


def fill(folder: Path, outside: Path) -> None:
    """Plain files, hidden ones, links, and files with names like localllm's own; all of them old."""
    digest = f"sha256-{'0' * 64}"
    names = [
        *("notes.txt", ".hidden", "mine.gguf", "new.gguf", "model.tmp", ".model.tmp", ".b.tmp", "sessions.db"),
        *("Modelfile", "config.toml.bak", "kernels/photo.jpg", "kv/photo.jpg", "partial/notes.json", "blobs/tax.pdf"),
        *(f"{'ab' * 12}/photo.jpg", f"{'ab' * 12}/.hidden", f"kernels/{'cd' * 12}/photo.jpg", "0123abcd/photo.jpg"),
        *(f"kv/{'ef' * 16}/photo.kv", f"{'ef' * 16}/photo.jpg", f"kv/{'ef' * 16}/notes.tmp", "hub/version.txt"),
        *(f"blobs/{digest}", f"blobs/{digest}-partial", "manifests/registry.ollama.ai/library/model/latest"),
        *(f"partial/{digest}.part", f"partial/{digest}.json", "partial/.localllm-old.tmp", "blobs/.localllm-old.tmp"),
        *("packed/photo.packed", f"packed/{'ab' * 16}.jpg", "packed/.localllm-old.tmp", "packed/.localllm-old.packed"),
        *("models/blobs/tax.pdf", f"models/partial/{digest}.part", "huggingface/hub/models--a--b/refs/main"),
    ]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"somebody's {name}\n" * 50)
    (folder / "link.txt").symlink_to(outside / "file")
    (folder / ("12" * 12)).symlink_to(outside)
    (folder / "kv" / ("34" * 16)).symlink_to(outside)
    (folder / "dangling").symlink_to(outside / "nothing")
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, (OLD, OLD), follow_symlinks=False)


def seen(folders: list[Path]) -> dict[str, tuple[object, ...]]:
    """Every entry with its kind, content, permissions and time; a folder's time changes when an entry is added."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (path for folder in folders for path in folder.rglob("*")):
        state = path.lstat()
        if path.is_symlink():
            found[str(path)] = ("link", os.readlink(path))
        elif path.is_dir():
            found[str(path)] = ("folder",)
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path)] = ("file", content, state.st_mode, state.st_mtime_ns)
    return found


def places(folder: Path, kind: str) -> dict[str, str]:
    """Variables that point there: each folder directly, or the bases from which the folders are derived."""
    if kind == "home":
        return {"HOME": str(folder)}
    if kind == "user folders":
        names = ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
        return {"HOME": str(folder / "home"), **dict.fromkeys(names, str(folder))}
    names = (
        "LOCALLLM_MODEL_STORE",
        "LOCALLLM_MODEL_FOLDERS",
        "OLLAMA_MODELS",
        "HF_HUB_CACHE",
        "HF_HOME",
        "LLAMA_CACHE",
    )
    return {"HOME": str(folder / "home"), **dict.fromkeys(names, str(folder))}


def serves_or_ended(process: Forked) -> bool:
    return b" serves on " in process.err.read_bytes() or process.poll() is not None


@pytest.mark.parametrize("kind", ["home", "user folders", "settings"])
def test_every_command_leaves_them_as_they_are(
    tmp_path: Path, kind: str, children: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, outside = tmp_path / "full", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("linked to")
    (outside / "photo.kernel").write_text("linked to")
    fill(folder, outside)
    for name in ("localllm", ".local/share/localllm", ".cache/localllm", ".cache/localllm/kernels"):
        fill(folder / name, outside)
    before = seen([folder, outside])
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HF_", "OLLAMA_"))}
    variables |= {"HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT), **places(folder, kind)}
    monkeypatch.chdir(folder)
    for line in COMMANDS:
        words = line.format(folder=folder, digest=f"sha256-{'0' * 64}").split()
        # The kernels shared by all tests must not be removed.
        environment = {**variables, CACHE_VARIABLE: ""} if words[0] == "cache" else variables
        process = children.start(PROGRAM, words, environment)
        try:
            if words[0] == "serve":
                eventually(functools.partial(serves_or_ended, process))
                process.send_signal(signal.SIGTERM)
            process.wait()
        finally:
            process.kill()
        output = b"".join(process.communicate())
        assert b"defect" not in output, (line, output)
        assert words[0] != "serve" or b" serves on " in output, output
        after = seen([folder, outside])
        changed = {name for name, state in before.items() if after.get(name) != state}
        assert not changed, (line, changed, output.decode(errors="replace"))
