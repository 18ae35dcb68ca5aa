"""Hostile templates: each ends with a TemplateError and leaves the program unchanged."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gguf_io.chat_template import ChatTemplate, sandbox
from gguf_io.errors import TemplateError
from tests.systems import ON_WINE
from tests.waiting import PATIENCE_S, eventually

USER = [{"role": "user", "content": "hello"}]

TOO_LONG = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested ranges in a filter": "{% filter upper %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfilter %}",
    "power in one operation": "{% set n = 9 ** messages | length %}{{ n ** (n ** n) }}",
    "power folded by the compiler": "{{ 9 ** (9 ** 9) }}",
    "loop over a growing list": "{% set l = [0] %}{% for i in l %}{% set _ = l.append(i) %}{% endfor %}",
    "filter of huge counts": "{{ 'abc' | slice(10 ** 9) | list }}",
    "sorting again and again": "{{ range(99999) | list | sort | map('string') | join | length }}" * 400,
}

TOO_LARGE = {
    "string multiplication": "{{ 'x' * 10 ** 10 }}",
    "list multiplication": "{{ ([0] * 10 ** 9) | length }}",
    "doubling": "{% set ns = namespace(s='xxxx') %}{% for i in range(90) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "padding": "{{ 'x'.ljust(10 ** 10) }}",
    "centring": "{{ 'x' | center(10 ** 10) }}",
    "percent format": "{{ '%1000000000d' % 1 }}",
    "format method": "{{ '{:1000000000d}'.format(1) | length }}",
    "replacement": "{{ ('a' * 10000) | replace('a', 'b' * 100000) }}",
    "indented json": "{{ [[1]] | tojson(indent=10 ** 9) }}",
    "batches": "{{ 'abc' | batch(10 ** 9, 'x') | list }}",
}

REFUSED = {
    "class of a string": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "attr filter": "{{ (messages | attr('__class__')).__name__ }}",
    "format string": "{{ '{0.__class__.__mro__}'.format('') }}",
    "namespace attribute": "{% set ns = namespace(__class__=1) %}",
    "module of a class": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "changing its input": "{{ messages[0].update(role='system') }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "range": "{{ range(10 ** 9) | list }}",
    "recursive macro": "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "deep json": "{{ ('[' * 100000) | from_json }}",
    "another file": "{% include '/etc/passwd' %}",
    "endless output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
}

DO_NOT_COMPILE = {
    "nested parentheses": "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "nested lists": "{{ " + "[" * 900 + "]" * 900 + " }}",
    "nested loops": "{% for a in 'ab' %}" * 200 + "{% endfor %}" * 200,
    "signs": "{{ " + "-" * 60000 + "1 }}",
    "unclosed comment": "{#" * 60000,
    "unknown tag": "{% nonsense %}",
}


def rejection(source: str) -> str:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(USER)
    return str(caught.value)


@pytest.mark.skipif(ON_WINE, reason="Wine does not end a process at its job's limit of processor time")
@pytest.mark.parametrize("attack", TOO_LONG)
def test_time_is_bounded(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 0.2)  # before a fast machine has filled its memory
    monkeypatch.setattr(sandbox, "WALL_GRACE_SECONDS", PATIENCE_S)
    assert "CPU time" in rejection(TOO_LONG[attack])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's address space")
@pytest.mark.parametrize("attack", TOO_LARGE)
def test_memory_is_bounded(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_SECONDS", "MAX_CPU_SECONDS"):  # page faults may take longer than the limit
        monkeypatch.setattr(sandbox, name, PATIENCE_S)
    assert "MiB of memory" in rejection(TOO_LARGE[attack])


@pytest.mark.parametrize("attack", REFUSED)
def test_reaching_out_is_refused_with_the_line(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CPU_SECONDS", PATIENCE_S)
    monkeypatch.setattr(sandbox, "MAX_CPU_SECONDS", PATIENCE_S)
    message = rejection("first line\n" + REFUSED[attack])
    assert "line 2" in message or "output exceeds" in message


@pytest.mark.parametrize("attack", DO_NOT_COMPILE)
def test_absurd_sources_do_not_compile(attack: str) -> None:
    assert "chat template" in rejection(DO_NOT_COMPILE[attack])


def test_a_source_beyond_the_cap_is_not_run() -> None:
    with pytest.raises(TemplateError, match="131073 characters"):
        ChatTemplate("x" * (sandbox.MAX_SOURCE_CHARS + 1))


def test_waiting_without_cpu_time_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    others = set(psutil.Process().children())
    template.render(USER)
    (worker,) = set(psutil.Process().children()) - others
    worker.suspend()
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 0.1)
    monkeypatch.setattr(sandbox, "WALL_GRACE_SECONDS", 0.0)
    with pytest.raises(TemplateError, match="had not answered"):
        template.render(USER)


def test_a_template_works_again_after_it_was_ended() -> None:
    template = ChatTemplate(
        "{% if messages[0].content == 'loop' %}{{ 'x' * 10 ** 10 }}{% endif %}{{ messages[0].content }}"
    )
    assert template.render(USER) == "hello"
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render(USER) == "hello"


def test_other_threads_run_meanwhile() -> None:
    beats = 0
    finished = threading.Event()

    def beat() -> None:
        nonlocal beats
        while not finished.wait(0.01):
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        rejection(TOO_LONG["power in one operation"])
    finally:
        finished.set()
        thread.join()
    assert beats >= 10  # in-process, this one multiplication would hold the GIL throughout


@pytest.fixture
def no_children() -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


@pytest.mark.usefixtures("no_children")
def test_the_process_ends_with_the_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    template.render(USER)
    del template


def test_the_process_ends_with_the_program() -> None:
    program = (
        "import psutil; from gguf_io.chat_template import ChatTemplate; t = ChatTemplate('x'); t.render([]);"
        "print(psutil.Process().children()[0].pid, flush=True); import os; os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    worker = int(done.stdout)
    eventually(lambda: has_ended(worker))


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if it has not been waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_long_conversations_have_time_in_proportion(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This template scans all messages for each message."""
    template = ChatTemplate((data_dir / "templates/google-gemma-4-31B-it.jinja").read_text("utf-8"))
    turn = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    template.render(turn)
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 0.05)
    assert template.render(turn * 150).count("<|turn>model\nA<turn|>") == 150


def test_the_parent_does_not_load_jinja() -> None:
    program = "import sys, gguf_io.chat_template; sys.exit('jinja2' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_worker_does_not_load_numpy() -> None:
    program = "import sys, gguf_io.chat_template.worker; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_threads_may_share_a_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = template.render([{"role": "user", "content": f"number {number}"}])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"number {number}" for number in range(16)}
