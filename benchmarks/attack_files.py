"""Attacks on files, disks and processes, each in a home of its own. Used by benchmarks/attack.py."""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from benchmarks.attack_stage import PATIENCE_S, Served, SkippedError, Stage, answer_of, check, line_of, with_template
from localllm.chats import SessionStore
from localllm.chats.conversation import Conversation
from localllm.chats.database import SessionError
from localllm.chats.parameters import Parameters
from tests.localllm.library.model_server import Answer, ModelServer

LONG = "Once upon a time there was a little girl named Lily who liked to play in the park with her dog. " * 24
CGROUP = Path("/sys/fs/cgroup/memory")


def token_redirect(stage: Stage) -> str:
    """A repository that redirects the download to another host, which would learn the token."""
    data = stage.models[0].read_bytes()
    with ModelServer().running() as hub, ModelServer().running() as other:
        hub.add_hub("user/r", {"r-Q8_0.gguf": data})
        other.routes["/cdn"] = data
        hub.redirects[f"/user/r/resolve/{'ab' * 20}/r-Q8_0.gguf"] = f"{other.url}/cdn"
        done = stage.command("pull", "hf.co/user/r", HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
        told = [any(word in headers for word in ("authorization", "cookie")) for _, headers in other.requests]
        check(done.returncode == 0 and bool(told) and not any(told), done.stderr[-200:])
        own = sum(headers.get("authorization") == "Bearer hf_secret" for _, headers in hub.requests)
    return f"the host itself got the token {own} times, the other one 0 of {len(told)}"


def damaged_kv(stage: Stage) -> str:
    """KV cache segments with flipped bits, truncated, emptied, and swapped with each other and another model's."""

    def answers() -> list[str]:
        with stage.serve() as served:
            found = [answer_of(served, model, LONG, 24) for model in (served.model, served.other)]
            time.sleep(1)  # KV is written to disk while the server is idle
            return found

    expected = answers()
    check(len(stage.kv_files()) >= 2, "nothing was kept")
    dice, tried = random.Random(1), 0
    originals = {path: path.read_bytes() for path in stage.kv_files()}
    for damage in ("bits", "cut", "empty", "exchanged", "longer", "link"):
        for path, data in originals.items():
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            path.parent.mkdir(parents=True, exist_ok=True)
            changed = bytearray(data)
            for _ in range(8):
                changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            another = originals[dice.choice([each for each in originals if each != path])]
            if damage == "link":
                path.symlink_to("/dev/zero")
            else:
                ways = {"bits": bytes(changed), "cut": data[: len(data) // 2], "empty": b"", "exchanged": another}
                path.write_bytes(ways.get(damage, data * 2))
            tried += 1
        check(answers() == expected, f"{damage}: another answer")
    return f"{tried} files damaged in 6 ways: the answers are the same"


def foreign_links(stage: Stage) -> str:
    """Links in the store and cache that point to the user's files."""
    letter = stage.home / "letter.txt"
    letter.write_text("dear")
    with ModelServer().running() as registry:
        digests = registry.add_ollama("library/x", "latest", {"model": stage.models[0].read_bytes()})
        store = stage.home / "data/localllm/models"
        name = digests["model"].replace(":", "-")
        check(stage.command("pull", f"{registry.host}/library/x").returncode == 0, "the pull failed")
        check(stage.command("rm", f"{registry.host}/library/x").returncode == 0, "rm failed")
        for folder, ending in (("partial", ".part"), ("partial", ".json"), ("partial", ".lock")):
            link = store / folder / f"{name}{ending}"
            link.unlink(missing_ok=True)
            link.symlink_to(letter)
        done = stage.command("pull", f"{registry.host}/library/x")
        stage.command("rm", "--unfinished")
        for link in (store / "partial").iterdir():
            link.unlink()
        hard = store / "partial" / f"{name}.part"
        os.link(letter, hard)
        stage.command("pull", f"{registry.host}/library/x")
        stage.command("rm", "--unfinished")
    check(letter.read_text() == "dear", f"the letter is now {letter.read_bytes()[:40]!r}")
    return f"the letter is as it was; pull over links: {line_of(done.stderr)}"


def hostile_templates(stage: Stage) -> str:
    """Files whose templates loop, grow, and try to reach Python objects."""
    found = []
    for text in (
        "{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}",
        "{% set x = 'x' * 10**9 %}{{ x * 9 }}",
        "{{ 9**(9**9) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% import os %}{{ os.system('touch ' ~ 'owned') }}",
        "{{ cycler.__init__.__globals__.os.popen('touch owned').read() }}",
    ):
        path = stage.home / "hostile.gguf"
        with_template(stage.models[0], path, text)
        began = time.perf_counter()
        done = stage.command("run", str(path), "hi", "--max-tokens", "2")
        found.append(f"{done.returncode} in {time.perf_counter() - began:.0f} s")
        check(done.returncode not in (0, -9, -11) and "Traceback" not in done.stderr, f"{text}: {done.stderr[-300:]}")
    check(not list(Path.cwd().glob("owned")) and not list(stage.home.rglob("owned")), "a command was run")
    return "; ".join(found)


@contextlib.contextmanager
def _small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=False, capture_output=True
    )
    if made.returncode:
        raise SkippedError("file systems cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


def full_disk(stage: Stage) -> str:
    """A disk of 2 MiB for data and cache: pull, create, KV cache and chats."""
    with (
        ModelServer().running() as registry,
        _small_disk(stage.home / "data", "2m"),
        _small_disk(stage.home / "cache", "1m"),
    ):
        registry.add_ollama("library/x", "latest", {"model": stage.models[0].read_bytes()})
        pulled = stage.command("pull", f"{registry.host}/library/x")
        check(pulled.returncode != 0 and "Traceback" not in pulled.stderr, pulled.stderr[-300:])
        modelfile = stage.home / "Modelfile"
        modelfile.write_text(f"FROM {stage.models[0]}\nSYSTEM {'x' * 500_000}\n")
        ballast = stage.home / "data/ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(4096))
        created = stage.command("create", "mine", "-f", str(modelfile))
        check("Traceback" not in created.stderr, created.stderr[-300:])
        with stage.serve() as served:
            first, second = (answer_of(served, None, LONG, 16) for _ in range(2))
            check(first == second, "another answer")
        path = stage.home / "data/chats.db"
        try:
            _chat(path, 50)
            chats = "saved"
        except SessionError as error:
            chats = str(error)
        ballast.unlink(missing_ok=True)
        again = stage.command("list")
        check(again.returncode == 0, again.stderr[-300:])
    said = f"pull: {line_of(pulled.stderr)}; create: {line_of(created.stderr)}"
    return f"{said}; serve answers; chats: {chats.rpartition(': ')[2]}"


def _chat(path: Path, turns: int) -> SessionStore:
    store = SessionStore(path)
    conversation = Conversation(store, "m", Parameters())
    for number in range(turns):
        conversation.ask(f"Question {number} " + "x" * 2000)
        answer = conversation.begin_answer()
        answer.content = "Answer"
        conversation.save(answer)
    return store


def damaged_chats(stage: Stage) -> str:
    """A chat database with flipped bits, truncated, of another program, and locked by another program."""
    whole = stage.home / "whole.db"
    _chat(whole, 5).close()
    data, dice = whole.read_bytes(), random.Random(2)
    opened = refused = 0
    for number in range(60):
        path = stage.home / f"chats-{number}.db"
        changed = bytearray(data)
        for _ in range(20):
            changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(
            [bytes(changed), data[: dice.randrange(len(data))], b"SQLite format 3\0" + b"\0" * 4000][number % 3]
        )
        try:
            store = SessionStore(path)
            with contextlib.suppress(SessionError):
                store.sessions()
            store.close()
            opened += 1
        except SessionError:
            refused += 1
    foreign = stage.home / "foreign.db"
    with contextlib.closing(sqlite3.connect(foreign)) as db:
        db.execute("CREATE TABLE photos (name)")
        db.commit()
    before = foreign.read_bytes()
    with contextlib.suppress(SessionError):
        SessionStore(foreign).close()
    check(foreign.read_bytes() == before, "another program's database was changed")
    with contextlib.closing(sqlite3.connect(whole, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        try:
            _chat(whole, 1).close()
            locked = "saved"
        except SessionError as error:
            locked = str(error).rpartition(": ")[2]
    return f"60 damaged: {opened} opened, {refused} refused; another program's: unchanged; locked: {locked}"


def killed_while_all_is_written(stage: Stage) -> str:
    """kill -9 of a server and a pull, ten times, while they write answers, KV and a model."""
    data = stage.models[0].read_bytes()
    with ModelServer().running() as registry:
        registry.add_ollama("library/x", "latest", {"model": data})
        registry.faults.append(_slowly)
        with stage.serve() as served:
            expected = answer_of(served, None, LONG, 24)
        for number in range(10):
            _serve_and_kill(stage, registry, 0.2 * (number + 1), lambda served: served.process.kill())
        registry.faults.clear()
        return _after(stage, registry, expected, "10 times killed")


def out_of_memory(stage: Stage) -> str:
    """A server in a control group that runs out of memory in the middle of an answer, so that the kernel kills it."""
    limit = CGROUP / "memory.limit_in_bytes"
    if not limit.exists() or not os.access(CGROUP, os.W_OK):
        raise SkippedError("there is no control group of memory that may be written")
    group = CGROUP / f"localllm-attack-{os.getpid()}"
    group.mkdir()
    try:
        with ModelServer().running() as registry:
            registry.add_ollama("library/x", "latest", {"model": stage.models[0].read_bytes()})
            registry.faults.append(_slowly)
            with stage.serve() as served:
                expected = answer_of(served, None, LONG, 24)
            (group / limit.name).write_text(str(1200 << 20))

            def starve(served: Served) -> None:
                """Let a process in the group take the remaining memory, so that the kernel kills the server."""
                script = f"open('{group}/cgroup.procs', 'w').write('0'); held = bytearray(3 << 30)"
                hungry = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
                Path(f"/proc/{served.process.pid}/oom_score_adj").write_text("1000")  # the kernel kills it first
                try:
                    served.process.wait(60)
                finally:
                    hungry.kill()
                    hungry.wait()

            joins = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
            for number in range(3):
                status = _serve_and_kill(stage, registry, 1.0 + number, starve, joins)
                check(status == -signal.SIGKILL, f"it ended with {status}")
            registry.faults.clear()
            return _after(stage, registry, expected, "3 times killed by the kernel")
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def _slowly(_path: str, answer: Answer) -> None:
    answer.pause_s = 0.01


def _serve_and_kill(
    stage: Stage, registry: ModelServer, seconds: float, kill: Callable[[Served], None], before: list[str] | None = None
) -> int:
    """Start a server and a pull, kill both while the server answers and writes KV; return the server's status."""
    with stage.serve(before=before or []) as served:
        pull = stage.start("pull", f"{registry.host}/library/x")
        model = {"model": served.model, "options": {"num_predict": 2000, "seed": 1}}

        def ask(number: int) -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(
                    served.url + "/api/generate", json={**model, "prompt": f"{number} {LONG}"}, timeout=PATIENCE_S
                )

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        time.sleep(seconds)
        kill(served)
        pull.kill()
        pull.wait()
        for client in clients:
            client.join()
        return served.process.wait()


def _after(stage: Stage, registry: ModelServer, expected: str, what: str) -> str:
    """After the kills: the pull resumes, everything is readable, the answer is the same, and nothing is left over."""
    segments, left = len(stage.kv_files()), stage.temporary()
    for path in left:  # make them look old enough to be removed
        os.utime(path, (time.time() - 7200,) * 2)
    pulled = stage.command("pull", f"{registry.host}/library/x")
    check(pulled.returncode == 0, pulled.stderr[-300:])
    for call in (("verify",), ("list",), ("cache",)):
        done = stage.command(*call)
        check(done.returncode == 0, f"{call}: {done.stderr[-300:]}")
    with stage.serve() as served:
        check(answer_of(served, None, LONG, 24) == expected, "another answer")
        answer_of(served, None, "Then " + LONG, 24)
        time.sleep(2)  # new KV is written, and old files are removed
    still = [*stage.temporary(), *(stage.home / "data").rglob("*.part")]
    check(not still, f"left over: {[str(path.relative_to(stage.home)) for path in still]}")
    clean = f"the pull goes on, verify and list are clean, the answer is the same, {segments} segments of KV"
    return f"{what}: {clean}, {len(left)} temporary files, gone an hour later"


FILE_ATTACKS: tuple[Callable[[Stage], str], ...] = (
    token_redirect, damaged_kv, foreign_links, hostile_templates, full_disk, damaged_chats, killed_while_all_is_written,
    out_of_memory,
)  # fmt: skip
