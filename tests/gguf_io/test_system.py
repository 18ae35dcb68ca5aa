"""Files, folders and processes: the same contracts on every system."""

import _thread
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest

from gguf_io.access import only_writer
from gguf_io.system import (
    OWN_SESSION,
    NotRegularError,
    OpenFolder,
    Started,
    as_utf_8,
    bytes_at,
    can_name_file,
    command_of,
    disk_bytes,
    end_within,
    ending_in_order,
    file_of_url,
    is_private,
    is_terminal,
    lengthen,
    next_of,
    open_own,
    open_regular,
    pip_line,
    read_at,
    replace,
    run_within,
    same_place,
    shell_line,
    sync_file,
    sync_folder,
    write_at,
)
from tests.systems import ON_WINE, OWN_CONSOLE, needs_consoles, needs_modes, needs_named_pipes, needs_signals
from tests.waiting import eventually

PACKAGES = [
    Path(__file__).parents[2] / name for name in ("localllm", "gguf_io", "cpu_kernels", "gpu_offload", "models", "tui")
]
HOME = {"system.py", "windows.py"}
UNSET = "Remove-Item Env:%s -ErrorAction Ignore"


def test_the_file_of_a_url(tmp_path: Path) -> None:
    for path in (tmp_path / "a b%20c#d?.txt", tmp_path / "ä" / "x"):
        for url in (path.as_uri(), path.as_uri().replace("file://", "file://localhost", 1)):
            assert Path(file_of_url(url)) == path
    with pytest.raises(ValueError, match="IPv6"):
        file_of_url("file://[/x")


@needs_signals
def test_a_request_to_end_lets_blocks_clean_up_and_an_ignored_one_stays_so() -> None:
    cleaned: list[str] = []
    usual = signal.getsignal(signal.SIGTERM)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with pytest.raises(SystemExit) as ended, ending_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # a second one interrupts nothing
                cleaned.append("all of it")
        assert ended.value.code == 128 + signal.SIGTERM and cleaned
        assert signal.getsignal(signal.SIGTERM) == usual and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(os.name == "nt", reason="a path that begins with two slashes is another computer's")
def test_files_of_urls_with_more_slashes_or_bytes_that_are_no_text() -> None:
    written = {"file:////tmp/x": "//tmp/x", "file://///tmp/x": "///tmp/x", "file://host/tmp/x": "/tmp/x"}
    written["file:///%ff"] = "/\ufffd"
    assert {url: file_of_url(url) for url in written} == written


def opened(path: Path) -> "contextlib.closing[OpenFolder]":
    return contextlib.closing(OpenFolder(path))


def links(folder: Path) -> bool:
    """Whether this user may create symbolic links (on Windows, only with developer mode)."""
    try:
        (folder / "link-probe").symlink_to(folder)
        (folder / "link-probe").unlink()
    except OSError:
        return False
    return not ON_WINE


def test_what_one_system_has_is_imported_in_one_place() -> None:
    wanted = re.compile(
        r"\bimport (?:fcntl|termios|resource|pty|tty|msvcrt|winreg)\b|\bos\.O_[A-Z]+\b|\bos\.p(?:read|write)v?\b"
        r"|\bsys\.std\w+\.isatty\b"
    )
    found = [
        f"{path}: {use}"
        for package in PACKAGES
        for path in package.rglob("*.py")
        if not (package.name == "gguf_io" and path.name in HOME)
        for use in wanted.findall(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_bytes_are_written_and_read_at_offsets_by_many_threads(tmp_path: Path) -> None:
    fd = open_own(tmp_path / "file", new=True)
    try:
        pieces = {offset: bytes([offset % 251]) * 4096 for offset in range(0, 64 * 4096, 4096)}
        threads = [threading.Thread(target=write_at, args=(fd, data, offset)) for offset, data in pieces.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sync_file(fd)
        assert all(bytes_at(fd, 4096, offset) == data for offset, data in pieces.items())
        assert bytes_at(fd, 100, 64 * 4096 - 10) == pieces[63 * 4096][:10]
        assert bytes_at(fd, 100, 1 << 40) == b""
        room = bytearray(8)
        assert read_at(fd, memoryview(room)[2:5], 4094) == 3
        assert bytes(room) == b"\0\0" + pieces[0][:2] + pieces[4096][:1] + b"\0\0\0"
    finally:
        os.close(fd)


def test_a_lengthened_file_reads_as_zeros_where_nothing_was_written(tmp_path: Path) -> None:
    fd = open_own(tmp_path / "header", new=True)
    try:
        write_at(fd, b"header", 0)
        lengthen(fd, 1 << 30)
        assert bytes_at(fd, 8, 0) == b"header\0\0" and bytes_at(fd, 8, (1 << 30) - 4) == b"\0\0\0\0"
        if sys.platform != "win32":  # which does not tell
            assert disk_bytes(os.fstat(fd)) < 1 << 20
    finally:
        os.close(fd)


def test_ctrl_c_ends_the_wait_for_an_item() -> None:
    if sys.platform == "win32":
        interrupt = _thread.interrupt_main
    else:
        interrupt = partial(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
    queue: SimpleQueue[int] = SimpleQueue()
    sent = threading.Timer(0.05, interrupt)
    with pytest.raises(KeyboardInterrupt):
        sent.start()
        next_of(queue)
    sent.join()
    queue.put(7)
    assert next_of(queue) == 7


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    fd = open_own(tmp_path / "lines", new=True)
    write_at(fd, b"one\ntwo\r\n\x1athree", 0)
    os.close(fd)
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\r\n\x1athree"
    with open(open_regular(tmp_path / "lines"), "rb") as file:
        assert file.read() == b"one\ntwo\r\n\x1athree"


@pytest.mark.skipif(ON_WINE, reason="Wine 8 does not replace an open file, nor free its name at once")
def test_an_open_file_can_be_replaced_renamed_and_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    reading = open_regular(old)
    try:
        replace(new, old)
        assert (old.read_bytes(), bytes_at(reading, 9, 0)) == (b"new", b"old")
    finally:
        os.close(reading)
    writing = open_own(tmp_path / "unfinished", new=True)
    try:
        write_at(writing, b"whole", 0)
        replace(tmp_path / "unfinished", old)
        sync_folder(tmp_path)
        assert old.read_bytes() == b"whole"
        old.unlink()
    finally:
        os.close(writing)
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_being_written_can_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"old")
    writing = open_own(tmp_path / "unfinished", new=True)
    try:
        write_at(writing, b"whole", 0)
        replace(tmp_path / "unfinished", tmp_path / "target")
        write_at(writing, b"after", 5)
    finally:
        os.close(writing)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"target": b"wholeafter"}


def test_a_new_file_of_ours_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(b"x")
    with pytest.raises(FileExistsError):
        open_own(tmp_path / "theirs", new=True)
    os.close(open_own(tmp_path / "theirs", new=False))
    assert (tmp_path / "theirs").read_bytes() == b"x"


def test_non_files_are_refused_without_waiting(tmp_path: Path) -> None:
    with pytest.raises(NotRegularError, match="it is a folder"):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    with pytest.raises(ValueError, match="null"):
        open_regular(tmp_path / "a\0b")
    with pytest.raises(NotRegularError, match="it is not a regular file"):
        open_regular(Path(os.devnull))


@needs_named_pipes
def test_a_pipe_without_a_writer_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotRegularError):
        open_regular(tmp_path / "pipe")
    with opened(tmp_path) as folder, pytest.raises(NotRegularError):
        folder.read("pipe")


def test_links_are_followed_only_where_they_may_be(tmp_path: Path) -> None:
    if not links(tmp_path):
        pytest.skip("this user may not create symbolic links")
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    fd = open_regular(tmp_path / "link")
    assert bytes_at(fd, 9, 0) == b"content"
    os.close(fd)
    for opening in (
        lambda: open_regular(tmp_path / "link", follow_links=False),
        lambda: open_own(tmp_path / "link", new=False),
        lambda: OpenFolder(tmp_path).read("link"),
    ):
        with pytest.raises(OSError, match="link"):
            opening()
    assert (tmp_path / "file").read_bytes() == b"content"


def test_an_open_folder_reads_writes_replaces_and_removes(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.create("one", b"1")
        folder.create("two", b"2")
        with pytest.raises(FileExistsError):
            folder.create("one", b"3")
        folder.replace("two", "one")
        assert (folder.names(), folder.read("one"), folder.is_regular("one")) == (["one"], b"2", True)
        (tmp_path / "sub").mkdir()
        assert not folder.is_regular("sub")
        os.utime(tmp_path, (1000, 1000))
        assert folder.modified() == 1000
        folder.touch()
        assert folder.modified() > 1000
        folder.unlink("one")
        assert folder.names() == ["sub"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        OpenFolder(tmp_path / "file")


def test_paths_of_300_characters(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("name" * 30) / ("deep" * 15)
    folder.mkdir(parents=True)
    assert len(str(folder)) > 300
    os.close(open_own(folder / "a", new=True))
    replace(folder / "a", folder / "b")
    os.close(open_regular(folder / "b", follow_links=False))
    with opened(folder) as inside:
        inside.create("c", b"c")
        assert sorted(inside.names()) == ["b", "c"]
    assert is_private(folder)


def test_disk_space_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(1 << 16))
    assert disk_bytes((tmp_path / "file").stat()) >= 1 << 16


@needs_modes
def test_a_folder_that_others_may_write_to_is_not_private(tmp_path: Path) -> None:
    for mode, private in ((0o700, True), (0o755, True), (0o775, False), (0o777, False)):
        tmp_path.chmod(mode)
        with opened(tmp_path) as folder:
            assert is_private(tmp_path) == is_private(folder.place) == private, oct(mode)


ME, OTHER = "S-1-5-21-1-2-3-1001", "S-1-5-21-1-2-3-1002"


@pytest.mark.parametrize(
    ("descriptor", "private"),
    [
        # a folder below %LOCALAPPDATA%: the system, administrators and the user
        (f"O:{ME}D:AI(A;OICIID;FA;;;SY)(A;OICIID;FA;;;BA)(A;OICIID;FA;;;{ME})", True),
        # others may read and list
        (f"O:{ME}D:P(A;OICI;FA;;;{ME})(A;OICI;0x1200a9;;;BU)(A;OICI;FR;;;WD)", True),
        # a folder below C:\: whoever is authenticated may modify
        (f"O:{ME}D:AI(A;ID;FA;;;BA)(A;ID;FA;;;SY)(A;OICIID;0x1200a9;;;BU)(A;ID;0x1301bf;;;AU)", False),
        (f"O:{ME}D:(A;OICI;FA;;;{ME})(A;OICIIO;GA;;;CO)(A;CI;DCLC;;;BU)", False),
        (f"O:{ME}D:(A;;FW;;;WD)", False),
        (f"O:{ME}D:(A;;WD;;;{OTHER})", False),
        (f"O:{ME}D:(D;;FA;;;WD)(A;;FA;;;{ME})", True),  # an entry that denies
        (f"O:{OTHER}D:(A;;FA;;;{ME})", False),  # its owner may change the list
        (f"O:BAD:(A;;FA;;;{ME})(A;;FA;;;BA)", True),  # an administrator's folders belong to administrators
        (f"O:{ME}D:NO_ACCESS_CONTROL", False),
        (f"O:{ME}", False),
        (f'O:{ME}D:(XA;;FX;;;{ME};(@User.Title=="x"))(XA;;FA;;;BU;(@User.Title=="y"))', False),
    ],
)
def test_who_may_write_by_windows_access_list(descriptor: str, private: bool) -> None:
    assert only_writer(descriptor, ME) is private


def test_a_program_ends_with_what_it_started(tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    ticks.touch()
    inner = (
        f"import time, pathlib\nwhile True:\n    pathlib.Path({str(ticks)!r}).open('a').write('x'); time.sleep(0.02)"
    )
    outer = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}]); time.sleep(600)"
    started = Started([sys.executable, "-c", outer], stdin=subprocess.DEVNULL)
    eventually(lambda: ticks.stat().st_size > 2)
    started.end()
    assert started.process.returncode not in (None, 0)
    size = ticks.stat().st_size
    threading.Event().wait(0.2)
    assert ticks.stat().st_size == size
    started.end()


@pytest.mark.parametrize(
    "name", ["NUL", "con", "aux.txt", "COM1", "lpt9.gguf", "a:b", "b0:latest", "end.", "end ", "what?", "a\\b", "x\ny"]
)
def test_names_that_windows_reserves(name: str) -> None:
    assert not can_name_file(name, on_windows=True)
    assert can_name_file(name, on_windows=False)


@pytest.mark.parametrize(
    "name", ["console", "nul-1", "com10", "a.b.c", ".hidden", "q4_K-m", "con_1.gguf", "\u00e9t\u00e9"]
)
def test_names_that_every_system_allows(name: str) -> None:
    assert can_name_file(name, on_windows=True)
    assert can_name_file(name, on_windows=False)


def test_places_are_the_same_whatever_leads_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert same_place(tmp_path / "a", tmp_path / "a" / ".." / "a")
    assert same_place(tmp_path / "missing", tmp_path / "missing")
    assert not same_place(tmp_path / "a", tmp_path)
    if os.path.exists(tmp_path / "A"):  # case-insensitive folders, as usual on macOS and Windows
        assert same_place(tmp_path / "a", tmp_path / "A")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a Linux subreaper")
@pytest.mark.parametrize("ends", ["by itself", "stopped", "its parent is killed"])
@pytest.mark.parametrize(
    "command", ["setsid {} &", "setsid setsid {} & disown", "(nohup {} &) ; true", "env -i setsid {} &"]
)
def test_what_left_the_session_ends_too(ends: str, command: str, tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    ticks.touch()
    loop = tmp_path / "loop"
    loop.write_text(f"#!/bin/sh\nwhile true; do echo x >> {ticks}; sleep 0.02; done\n", encoding="utf-8")
    loop.chmod(0o755)
    line = "bash -c " + shlex.quote(
        command.format(f"{loop} </dev/null >/dev/null 2>&1")
        + "\n"
        + (f"while [ $(stat -c %s {ticks}) -lt 6 ]; do sleep 0.01; done" if ends == "by itself" else "sleep 600")
    )
    started = Started(line, shell=True, stdin=subprocess.DEVNULL)
    if ends == "by itself":
        assert started.process.wait(60) == 0
    else:
        eventually(lambda: ticks.stat().st_size > 4)
        if ends == "its parent is killed":
            started.process.terminate()  # what the kernel sends
            started.process.wait(60)
        started.end()
    size = ticks.stat().st_size
    threading.Event().wait(0.2)
    assert ticks.stat().st_size == size
    started.end()


@needs_consoles
def test_a_console_obeys_escapes_once_it_is_asked() -> None:
    ask = "from gguf_io.system import is_terminal, obeys_escapes\n"
    ask += "for name in ('CONOUT$', 'CONOUT$', 'NUL'): print(obeys_escapes(open(name, 'w')))\n"
    ask += "for name, mode in (('CONIN$', 'r'), ('CONOUT$', 'w'), ('NUL', 'r')): print(is_terminal(open(name, mode)))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, **OWN_CONSOLE)
    assert done.stdout.split() == ["True", "True", "False"] * 2


def test_the_null_device_and_files_are_no_terminals(tmp_path: Path) -> None:
    for name in (os.devnull, tmp_path / "a"):
        with open(name, "w", encoding="utf-8") as stream:
            assert not is_terminal(stream)


@needs_consoles
@pytest.mark.parametrize("page", [437, 65001])
def test_what_windows_own_commands_print_is_read_in_the_consoles_code_page(page: int, tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    ask = "import subprocess, sys\nfrom gguf_io.system import as_utf_8\n"
    ask += "printed = subprocess.run(['cmd.exe', '/c', 'echo Gr\u00fc\u00dfe'], capture_output=True).stdout\n"
    script.write_text(f"{ask}sys.stdout.buffer.write(as_utf_8(printed))\n", encoding="utf-8")
    command = f'cmd.exe /d /c "chcp {page} >NUL & "{sys.executable}" "{script}""'
    done = subprocess.run(command, capture_output=True, check=True, **OWN_CONSOLE)
    assert done.stdout.decode().strip() == "Gr\u00fc\u00dfe"


def test_text_in_utf_8_and_what_is_no_text_stay_as_they_are() -> None:
    for data in ("Gr\u00fc\u00dfe \u6f22\r\n".encode(), b"\x89PNG\r\n\x1a\n\0\0\0\r", b""):
        assert as_utf_8(data) == data


def test_a_bounded_run_returns_what_the_program_wrote() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run_within(60, [sys.executable, "-c", code])
    assert (done.returncode, done.stdout.split(), done.stderr.split()) == (3, [b"out"], [b"err"])


def test_a_bounded_run_ends_though_a_program_that_it_started_holds_its_output() -> None:
    sleeps = "import subprocess, sys, time; {}time.sleep(600)"
    starts = sleeps.format(f"subprocess.Popen([sys.executable, '-c', {sleeps.format('')!r}]); ")
    with pytest.raises(subprocess.TimeoutExpired):
        run_within(0.5, [sys.executable, "-c", starts])


@pytest.mark.skipif(sys.platform != "linux", reason="Windows has no shell like this")
@pytest.mark.parametrize(
    ("command", "status"), [("exit 3", 3), ("kill -9 $$", -9), ("true", 0), ("no-such-command-x", 127)]
)
def test_exit_statuses_of_started_programs(command: str, status: int) -> None:
    started = Started(command, shell=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert started.process.wait(60) == status
    started.end()


@pytest.mark.parametrize(
    ("words", "variables", "removed", "posix", "powershell"),
    [
        (
            ["localllm", "serve", "--model", "a:8b"],
            {},
            [],
            "localllm serve --model a:8b",
            "localllm serve --model a:8b",
        ),
        (["a", "it's \u2018so"], {}, [], """a 'it'"'"'s \u2018so'""", "a 'it''s \u2018\u2018so'"),
        (["a", "-v.1", "--", "x=1", "@b", ""], {}, [], "a -v.1 -- x=1 @b ''", "a '-v.1' '--' 'x=1' '@b' ''"),
        (["C:/a b/c", "d"], {}, [], "'C:/a b/c' d", "& 'C:/a b/c' d"),
        (["a"], {"X": "1", "Y": "$b c"}, [], "X=1 Y='$b c' a", "$env:X = '1'; $env:Y = '$b c'; a"),
        (["a"], {"X": ""}, ["Y", "Z"], "env -u Y -u Z X='' a", f"{UNSET % 'Y'}; {UNSET % 'Z'}; $env:X = ''; a"),
        ([], {"X": "1", "Y": "2"}, [], "export X=1 Y=2", "$env:X = '1'; $env:Y = '2'"),
    ],
)
def test_commands_are_shown_as_the_shell_reads_them(
    words: list[str], variables: dict[str, str], removed: list[str], posix: str, powershell: str
) -> None:
    assert shell_line(words, variables, removed, on_windows=False) == posix
    assert shell_line(words, variables, removed, on_windows=True) == powershell


def test_packages_are_installed_by_this_pythons_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    words, variables = ["install", "a>=1"], {"CMAKE_ARGS": "-DX=1;2"}
    monkeypatch.setattr("shutil.which", lambda _name: str(Path(sys.executable).with_name("pip")))
    assert pip_line(*words, variables=variables) == shell_line(["pip", *words], variables)
    for other in (None, str(Path("other", "pip"))):
        monkeypatch.setattr("shutil.which", lambda _name, other=other: other)
        assert pip_line(*words) == shell_line([sys.executable, "-m", "pip", *words])


HARD = [
    "",
    "a b",
    "100%",
    "%PATH%",
    "C:\\a\\",
    "C:\\a b\\",
    '"',
    'say "a & b"',
    '\\"',
    'model="m:8b"',
    "^x|<y>",
    "!a!",
    "x;y,z=(1)",
    "é",
]
WINE_LACKS = {"100%", "%PATH%"}
"""Arguments that Wine 8's cmd.exe changes: it has no parts of variables."""


def test_programs_get_their_arguments(tmp_path: Path) -> None:
    """As npm starts them: on Windows by a batch file, whose interpreter would take quotes and & as its own."""
    script = tmp_path / "program.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv[1:]))", encoding="utf-8")
    if sys.platform == "win32":
        program = tmp_path / "a & b" / "program.CMD"
        program.parent.mkdir()
        program.write_text(f'@"{sys.executable}" "{script}" %*\n', encoding="utf-8")
    else:
        program = tmp_path / "program"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n', encoding="utf-8")
        program.chmod(0o700)
    given = [word for word in HARD if not (ON_WINE and word in WINE_LACKS)]
    for words in (given, *([word] for word in given)):
        done = subprocess.run(command_of(str(program), words), capture_output=True, check=True)
        assert json.loads(done.stdout) == words


def test_a_command_for_a_batch_file() -> None:
    made = command_of("C:\\x y\\a.cmd", ["-c", 'b="1 %"', "d\\"], on_windows=True)
    assert isinstance(made, str)
    assert made.partition(" ")[2] == '/e:on /v:off /d /s /c ""C:\\x y\\a.cmd" -c "b=""1 %%cd:~,%""" "d\\\\""'
    with pytest.raises(ValueError, match="line break"):
        command_of("a.bat", ["b\nc"], on_windows=True)
    assert command_of("a.exe", ["b\nc"], on_windows=True) == ["a.exe", "b\nc"]


CATCHES = """
import signal, sys, time
def end(*_):
    print("ended", flush=True)
    sys.exit(3)
signal.signal(getattr(signal, "SIGBREAK", signal.SIGTERM), end)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


ENDS = """
import subprocess, sys
from gguf_io.system import OWN_SESSION, end_within
with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, **OWN_SESSION) as process:
    process.stdout.readline()
    end_within(240, process)
    print(process.returncode, process.stdout.read().decode().strip())
"""


@pytest.mark.skipif(ON_WINE, reason="Wine 8 sends no Ctrl-Break")
def test_a_program_in_a_session_of_its_own_ends_by_itself() -> None:
    command = [sys.executable, "-c", ENDS, CATCHES]
    done = subprocess.run(command, capture_output=True, check=True, **OWN_CONSOLE)
    assert done.stdout.decode().strip() == "3 ended"


def test_a_program_that_does_not_end_is_killed() -> None:
    deaf = CATCHES.replace("sys.exit(3)", "pass")
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, **OWN_SESSION) as process:
        assert process.stdout and process.stdout.readline().split() == [b"ready"]
        end_within(0.2, process)
    assert process.returncode not in (None, 3)
