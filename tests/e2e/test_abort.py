"""llama.cpp may abort the process (GGML_ABORT). Everything stored before is complete afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_io import load_tokenizer, open_model
from localllm.chats import SessionStore
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from tests.localllm.engine.real_runners import open_real
from tests.oracle import llama_oracle

pytestmark = [
    pytest.mark.oracle,
    llama_oracle.needs_llama,
    pytest.mark.skipif(sys.platform == "win32", reason="exit codes of aborted processes differ"),
]
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside. " * 4

# Answers once, waits until the disk tier has all of it, and makes llama.cpp abort during a second answer.
CRASH = """
import sys, time
from pathlib import Path
from gguf_io import load_tokenizer, open_model
from gpu_offload.library import shared_library
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from tests.localllm.engine.real_runners import open_real
from localllm.chats import Message, Role, SessionStore

model, folder, text = sys.argv[1:]
with open_model(model) as file:
    tokenizer, runner = load_tokenizer(file), open_real("llama", file)
store = SessionStore(Path(folder) / "sessions.db")
session = store.create("model", {})
store.add(Message(0, session, None, Role.USER, text))
engine = Engine(runner, tokenizer, disk=DiskCache(Path(folder) / "kv", runner.info.kv_layout, 2**26))
engine.start()
prompt = tuple(tokenizer.encode(text))
request = GenerationRequest(prompt, SamplingParams(temperature=0), max_tokens=20)
answer = engine.submit(request).collect().token_ids
print(*answer, flush=True)
while list(DiskCache(Path(folder) / "kv", runner.info.kv_layout, 2**26).missing([*prompt, *answer[:-1]])):
    time.sleep(0.01)
second = engine.submit(GenerationRequest(prompt[:9], SamplingParams(temperature=0), max_tokens=400, ignore_eos=True))
for event in second:
    if event.token_ids:
        shared_library("ggml-base").ggml_abort(b"test_abort.py", 1, b"on purpose")
"""


def test_stored_chats_and_their_keys_and_values_survive(data_dir: Path, tmp_path: Path) -> None:
    path = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    crash = [sys.executable, "-c", CRASH, str(path), str(tmp_path), TEXT]
    root = Path(__file__).parents[2]
    variables = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # it would start a debugger
    process = subprocess.run(crash, capture_output=True, text=True, cwd=root, env=variables, check=False)
    assert process.returncode == -signal.SIGABRT, process.stderr
    assert "on purpose" in process.stderr
    told = tuple(map(int, process.stdout.split()))
    assert len(told) == 20

    store = SessionStore(tmp_path / "sessions.db")
    (session,) = store.sessions()
    assert [message.content for message in store.path(session.id)] == [TEXT]
    store.close()

    with open_model(path) as file:
        tokenizer, runner = load_tokenizer(file), open_real("llama", file)
    engine = Engine(runner, tokenizer, disk=DiskCache(tmp_path / "kv", runner.info.kv_layout, 2**26))
    prompt = tuple(tokenizer.encode(TEXT))
    stream = engine.submit(GenerationRequest(prompt, SamplingParams(temperature=0), max_tokens=20))
    while engine.step():
        engine.check_integrity()
    done = stream.collect()
    assert done.last.counts.cached_disk == len(prompt) - 1
    assert done.token_ids == told
    engine.close()
