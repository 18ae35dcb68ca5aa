"""What differs between Linux, macOS and Windows: files, folders, processes and their limits, terminals.

The one module that imports what only some systems have (Windows' own calls are in gguf_io/windows.py). It imports
nothing else of localllm, so that every package may use it. Functions raise OSError if the system refuses.
"""

import contextlib
import errno
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO, TypeVar
from urllib.parse import unquote, urlsplit

if sys.platform == "win32":
    from gguf_io import windows
else:
    import fcntl

_MOST_AT_ONCE = 1 << 30  # macOS refuses to read more than 2^31 - 1 bytes in one call
_LOWEST_PRIORITY = 19
# Naming Files, Paths, and Namespaces, in Microsoft's documentation of Windows.
_REFUSED = re.compile(r'[<>:"/\\|?*\x00-\x1f]')
_DEVICE = re.compile(
    r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9\u00b9\u00b2\u00b3]) *(?:\..*)?", re.IGNORECASE
)
_MOST_FILES = 65536
_PATIENCE_S = 2.0
_NO_VARIABLES: Mapping[str, str] = {}
_INTERRUPTED_S = 0.1


Item = TypeVar("Item")


class NotRegularError(OSError):
    """A pipe, device or folder where a file is needed; strerror says which."""

    def __init__(self, path: Path, is_folder: bool) -> None:
        what = "it is a folder" if is_folder else "it is not a regular file"
        super().__init__(errno.EINVAL, what, str(path))


def open_regular(path: Path, *, follow_links: bool = True, folder: int | None = None) -> int:
    """Open a regular file for reading. Returns its descriptor, which the caller closes.

    It does not wait for a pipe's writer. While the file is open, it may be renamed and deleted. follow_links: whether
    the path itself may be a symbolic link. folder: the descriptor of the folder that a relative path begins in. Raises
    OSError (NotRegularError for a pipe, device or folder), and ValueError for a NUL in the path.
    """
    if sys.platform == "win32":
        if os.path.isdir(path):  # or the error would be of missing rights
            raise NotRegularError(path, is_folder=True)
        fd = windows.open_file(path, windows.OPEN_EXISTING, writes=False)
    else:
        links = 0 if follow_links else os.O_NOFOLLOW
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links, dir_fd=folder)
    return _checked(fd, path, follow_links)


def read_file(path: Path, most: int = -1) -> bytes:
    """A regular file's content, at most `most` bytes of it if that is not negative. Raises as open_regular does."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(most)


def make_folder(path: Path) -> None:
    """Create a folder of ours and those above it that are missing, which only this user may enter.

    Path.mkdir gives its mode to the last one only.
    """
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_folder(path.parent)
        make_folder(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_own(path: Path, *, new: bool, folder: int | None = None) -> int:
    """Open a file of ours for reading and writing, which only this user may do; create it if it does not exist.

    new: it must not exist. A link is never followed. While the file is open, it may be renamed and deleted. folder: as
    for open_regular. Returns its descriptor, which the caller closes.
    """
    if sys.platform == "win32":
        fd = windows.open_file(path, windows.CREATE_NEW if new else windows.OPEN_ALWAYS, writes=True)
    else:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_EXCL if new else 0)
        fd = os.open(path, flags, 0o600, dir_fd=folder)
    return _checked(fd, path, follow_links=False)


def _checked(fd: int, path: Path, follow_links: bool) -> int:
    """The descriptor of a file just opened, if it is a regular file and, unless follow_links, was not a link."""
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise NotRegularError(path, stat.S_ISDIR(state.st_mode))
        if sys.platform == "win32" and not follow_links and not os.path.samestat(state, os.lstat(path)):
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_at(fd: int, target: memoryview, offset: int) -> int:
    """Read from an offset of a file into a writable buffer of bytes; return how many, less than asked only at its end.

    Several threads may read one descriptor at once: its position is not used.
    """
    done = 0
    while done < len(target):
        some = target[done : done + _MOST_AT_ONCE]
        if sys.platform == "win32":
            count = windows.read_at(fd, some, offset + done)
        else:
            count = os.preadv(fd, [some], offset + done)
        if not count:
            break
        done += count
    return done


def bytes_at(fd: int, size: int, offset: int) -> bytes:
    """At most `size` bytes from an offset of a file, less only at its end."""
    data = bytearray(size)
    return bytes(data[: read_at(fd, memoryview(data), offset)])


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset of a file, whose position is not used."""
    rest = memoryview(data)
    while rest:
        some = rest[:_MOST_AT_ONCE]
        if sys.platform == "win32":
            count = windows.write_at(fd, some, offset)
        else:
            count = os.pwrite(fd, some, offset)
        rest, offset = rest[count:], offset + count


def will_read(fd: int, offset: int, size: int) -> None:
    """Ask the system to read ahead, where it can be asked."""
    if sys.platform == "linux":
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)


def lengthen(fd: int, size: int) -> None:
    """Give a new file a size that it does not fill; what is not written takes no disk space where that can be."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError):  # FAT has no such files
            windows.make_sparse(fd)
    os.ftruncate(fd, size)


def sync_file(fd: int) -> None:
    """Make a file's bytes survive a power cut. The file must be open for writing."""
    if sys.platform == "darwin":
        # fsync only hands them to the drive, which may keep them in its cache. Network file systems lack the call.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a power cut. Windows journals them, and has no call for it."""
    if sys.platform != "win32":
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_file(fd)
        finally:
            os.close(fd)


def replace(source: Path | str, target: Path | str, folder: int | None = None) -> None:
    """Rename a file, atomically replacing one that has the new name, even if it is being read.

    folder: the descriptor of the folder that both names are in; None if they are paths. Windows refuses while another
    program has opened either file without sharing it, as virus scanners do for moments: it is tried for two seconds.
    """
    due = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if folder is None:
                return os.replace(source, target)
            return os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)
        except PermissionError:
            if sys.platform == "win32" and time.monotonic() < due:
                with contextlib.suppress(OSError):  # the error to raise is that of os.replace
                    return windows.replace_open(os.fspath(source), os.fspath(target))
                time.sleep(0.01)
            else:
                raise


def remove_held_lock(path: Path) -> None:
    """Remove the file of a lock that this process holds.

    Windows refuses to remove what is open. There the empty file stays.
    """
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        if sys.platform != "win32":
            raise


def disk_bytes(state: os.stat_result) -> int:
    """The disk space that a file takes. Where the system does not tell (Windows), holes count too."""
    if sys.platform == "win32":
        return state.st_size
    return state.st_blocks * 512


def is_private(place: Path | int) -> bool:
    """Whether only this user, and the machine's administrators, can write to a folder or file.

    place: its path, or the descriptor of an open one.
    """
    if sys.platform == "win32":
        return windows.is_private(place)
    state = os.stat(place)
    return state.st_uid == os.getuid() and not state.st_mode & 0o022


class OpenFolder:
    """A folder opened once, so that later access is to the same folder even if its path changes meaning.

    Windows has no calls relative to an open folder: there, access is by path. Raises OSError, also for a link.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self.place: Path | int = path
        """What functions take that accept a path or a descriptor."""
        if sys.platform != "win32":
            self.place = self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        elif not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(path))

    def close(self) -> None:
        """Close the folder."""
        if self._fd is not None:
            os.close(self._fd)

    def modified(self) -> float:
        """When it was last touched, or an entry added or removed, in seconds since 1970."""
        return os.stat(self.place).st_mtime

    def touch(self) -> None:
        """Set the time that `modified` returns to now."""
        os.utime(self.place)

    def names(self) -> list[str]:
        """The names of its entries."""
        return os.listdir(self.place)

    def is_regular(self, name: str) -> bool:
        """Whether an entry is a regular file, and no link to one."""
        return stat.S_ISREG(os.lstat(self._named(name), dir_fd=self._fd).st_mode)

    def read(self, name: str, most: int = -1) -> bytes:
        """The content of a regular file, at most `most` bytes of it if that is not negative."""
        fd = open_regular(Path(self._named(name)), follow_links=False, folder=self._fd)
        with os.fdopen(fd, "rb") as file:
            return file.read(most)

    def create(self, name: str, content: bytes) -> None:
        """Write a new file that only this user can read. Raises FileExistsError."""
        with os.fdopen(open_own(Path(self._named(name)), new=True, folder=self._fd), "wb") as file:
            file.write(content)

    def replace(self, source: str, target: str) -> None:
        """Rename an entry, replacing the one that has the new name."""
        replace(self._named(source), self._named(target), self._fd)

    def unlink(self, name: str) -> None:
        """Remove an entry that is no folder."""
        os.unlink(self._named(name), dir_fd=self._fd)

    def _named(self, name: str) -> str:
        return os.path.join(self._path, name) if self._fd is None else name


def can_name_file(name: str, on_windows: bool = sys.platform == "win32") -> bool:
    """Whether a file or folder may have this name.

    Windows refuses some characters (a colon would name another stream of the file) and names of devices with any
    suffix, and drops dots and spaces at the end, so that the file would have another name.
    """
    if not on_windows:
        return "/" not in name and "\0" not in name
    return not (_REFUSED.search(name) or name.endswith((".", " ")) or _DEVICE.fullmatch(name))


def file_of_url(url: str) -> str:
    """The path of the file that a file: URL names, whatever its host. It is text, without bytes that are none.

    Raises ValueError for a malformed URL.
    """
    path = urlsplit(url).path
    if sys.platform == "win32":
        from urllib.request import url2pathname  # slow to import

        return url2pathname(path)
    return unquote(path)


def same_place(first: Path, second: Path) -> bool:
    """Whether two paths are equal or lead to the same existing file or folder, as names in other cases may."""
    return first == second or (os.path.exists(first) and os.path.exists(second) and os.path.samefile(first, second))


def next_of(queue: "SimpleQueue[Item]") -> Item:
    """A queue's next item, which is waited for. Ctrl-C ends the wait, for which Windows needs short ones."""
    while sys.platform == "win32":
        with contextlib.suppress(Empty):
            return queue.get(timeout=_INTERRUPTED_S)
    return queue.get()


def lower_thread_priority() -> None:
    """Let other threads of the machine go before the calling one, where each thread has a priority of its own."""
    if sys.platform == "win32":
        windows.lower_thread_priority()
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def raise_file_limit() -> None:
    """Let this process open as many files as the system's hard limit allows. Windows has no such limit."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MOST_FILES) if hard > 0 else _MOST_FILES, hard))


def address_space_limit() -> int | None:
    """Bytes of addresses that this process may use (ulimit -v), None if there is no such limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


SHELL = ("cmd.exe", "/d", "/s", "/c") if sys.platform == "win32" else ("/bin/sh", "-c")
"""The words before a command of the system's shell."""

# Words that PowerShell passes on as they are: it splits flags at dots and colons.
_POWERSHELL_WORD = re.compile(r"-{0,2}\w[\w-]*|[\w/\\][\w./:\\+-]*", re.ASCII)
_POWERSHELL_QUOTES = re.compile("['\u2018-\u201b]")
_BATCH_WORD = re.compile(r"[\w#$*+./:?@\\-]*[\w#$*+./:?@-]", re.ASCII)


def shell_line(
    words: Sequence[str],
    variables: Mapping[str, str] = _NO_VARIABLES,
    removed: Sequence[str] = (),
    on_windows: bool = sys.platform == "win32",
) -> str:
    """A command as a line for the user's shell: a POSIX shell, or PowerShell.

    variables: what to set for the command; without words, for all that the shell starts later, as PowerShell does in
    any case. removed: variables to unset.
    """
    if not on_windows:
        before = ["env", *(f"-u {name}" for name in removed)] if removed else [] if words else ["export"]
        assigned = (f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return " ".join([*before, *assigned, *map(shlex.quote, words)])
    statements = [f"Remove-Item Env:{name} -ErrorAction Ignore" for name in removed]
    statements += [f"$env:{name} = {_in_powershell(value, always=True)}" for name, value in variables.items()]
    command = " ".join(map(_in_powershell, words))
    return "; ".join([*statements, *([f"& {command}" if command.startswith("'") else command] if words else [])])


def _in_powershell(text: str, always: bool = False) -> str:
    if not always and _POWERSHELL_WORD.fullmatch(text):
        return text
    return "'" + _POWERSHELL_QUOTES.sub(r"\g<0>\g<0>", text) + "'"


def pip_line(*words: str, variables: Mapping[str, str] = _NO_VARIABLES) -> str:
    """A line for the user's shell that runs this Python's pip; the first pip on the path may belong to another one."""
    import shutil  # slow, and most processes do not need it

    found = shutil.which("pip")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    return shell_line([*(["pip"] if is_ours else [sys.executable, "-m", "pip"]), *words], variables)


def command_of(program: str, arguments: Sequence[str], on_windows: bool = sys.platform == "win32") -> "str | list[str]":
    """What Popen takes to start a program that gets these arguments as they are. program: its path.

    npm installs programs as batch files on Windows. cmd.exe reads their arguments first, and would take quotes, percent
    signs and ampersands as its own. Raises ValueError for a line break, which no batch file can be given.
    """
    if not on_windows or not program.lower().endswith((".bat", ".cmd")):
        return [program, *arguments]
    interpreter = os.environ.get("COMSPEC", "cmd.exe")
    return f'"{interpreter}" /e:on /v:off /d /s /c "{" ".join(map(_in_batch, (program, *arguments)))}"'


def _in_batch(word: str) -> str:
    """A word as cmd.exe passes it on to a batch file, and that to a program.

    Two quotes are one for the program and none for cmd.exe; %cd:~,% is an empty part of a variable, and keeps cmd.exe
    from reading the percent sign before it. As in Rust's standard library.
    """
    if re.search(r"[\r\n\0]", word):
        raise ValueError("an argument has a line break")
    if _BATCH_WORD.fullmatch(word):
        return word
    word = re.sub(r"(\\*)(\"|\Z)", lambda found: found[1] * 2 + found[2] * 2, word)
    return '"' + word.replace("%", "%%cd:~,%") + '"'


OWN_SESSION: dict[str, Any]
if sys.platform == "win32":
    OWN_SESSION = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
else:
    OWN_SESSION = {"start_new_session": True}
"""Arguments of Popen for a program that does not get this terminal's Ctrl-C."""


def end_within(seconds: float, process: "subprocess.Popen[bytes]") -> None:
    """Ask a program that was started with OWN_SESSION to end, and kill it if it does not within `seconds`.

    Windows asks by Ctrl-Break, for which this process needs a console; without one the program is killed at once.
    """
    if sys.platform == "win32":
        try:
            process.send_signal(signal.CTRL_BREAK_EVENT)
        except OSError:
            process.kill()
    else:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Within the block, SIGTERM, and SIGHUP as the terminal closes, raise SystemExit: what runs is ended in order.

    A signal that is ignored (nohup) stays ignored. Call it on the main thread.
    """
    numbers = [signal.SIGTERM]
    if sys.platform != "win32":
        numbers.append(signal.SIGHUP)
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) != signal.SIG_IGN}

    def end(number: int, _frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one would interrupt what ends
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Linux: a process that runs a command, adopts what the command leaves behind (a "subreaper", prctl(2)) and ends it all
# when the command ends, when it gets SIGTERM, or when the thread that started it ends. 36: PR_SET_CHILD_SUBREAPER.
# 1: PR_SET_PDEATHSIG.
_KEEPER = """
import ctypes, os, signal, subprocess, sys
libc = ctypes.CDLL(None)
libc.prctl(36, 1, 0, 0, 0)
def children():
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        yield int(name)
            except OSError:
                pass
def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while found := [*children()]:
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        for pid in found:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                pass
def stop(*_):
    end()
    os._exit(143)
signal.signal(signal.SIGTERM, stop)
libc.prctl(1, signal.SIGTERM, 0, 0, 0)
process = subprocess.Popen(sys.argv[1:], start_new_session=True)
status = process.wait()
end()
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
_END_S = 10.0


class Started:
    """A program in a session of its own, which can be ended together with all programs that it started.

    On Linux and Windows they end with it, also those that moved to another session; on macOS, those of its process
    group.
    """

    def __init__(self, command: str | Sequence[str], **options: Any) -> None:
        """options: those of Popen."""
        if sys.platform == "win32":
            self._job = windows.Job()
            self.process: subprocess.Popen[bytes] = self._job.start(command, **options)
        else:
            if sys.platform == "linux":
                words = [*SHELL, command] if isinstance(command, str) else list(command)
                command = [sys.executable, "-ISc", _KEEPER, *words]
                options.pop("shell", None)
            self.process = subprocess.Popen(command, start_new_session=True, **options)

    def end(self) -> None:
        """Kill the program and what it started, and wait for it. Idempotent."""
        if sys.platform == "win32":
            self._job.end()
        else:
            if sys.platform == "linux" and self.process.poll() is None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_END_S)
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_within(seconds: float, command: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
    """Run a program that may hang, without input, and return what it wrote; raises TimeoutExpired after `seconds`.

    It ends with all that it started. subprocess.run would wait on for a debugger or helper that holds its pipes.
    """
    import tempfile  # slow, and most processes do not need it

    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        started = Started(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        try:
            code = started.process.wait(seconds)
        finally:
            started.end()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, output.read(), errors.read())


def confine_this_process(memory_bytes: int) -> None:
    """Forbid this process to start others or write files, and bound its memory.

    macOS cannot bound memory, because it reserves more addresses than any bound; Windows cannot forbid writing.
    """
    if sys.platform == "win32":
        windows.confine(memory_bytes)
        return
    import resource

    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0}
    if sys.platform == "linux":
        bounds[resource.RLIMIT_AS] = memory_bytes
    for limit, bound in bounds.items():
        _, hard = resource.getrlimit(limit)
        lowest = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(limit, (lowest, lowest))


def limit_processor_time(seconds: float) -> None:
    """End this process, with OUT_OF_TIME, when it has used as much processor time from now on; 0 removes the limit.

    On Windows only after `confine_this_process`.
    """
    if sys.platform == "win32":
        windows.limit_processor_time(seconds)
    else:
        # SIGPROF keeps its default action, which ends the process even inside one long C call such as 9**9**9.
        signal.setitimer(signal.ITIMER_PROF, seconds)


# Popen's return codes of processes that limit_processor_time ended, that aborted, and whose stack overflowed.
if sys.platform == "win32":
    OUT_OF_TIME = 1816  # ERROR_NOT_ENOUGH_QUOTA
    ABORTED = {3, 0xC0000409}  # the C runtime's abort; STATUS_STACK_BUFFER_OVERRUN, by which Rust and newer code abort
    OVERFLOWED = {0xC00000FD}  # STATUS_STACK_OVERFLOW
else:
    OUT_OF_TIME = -signal.SIGPROF
    ABORTED = {-signal.SIGABRT}
    OVERFLOWED = {-signal.SIGSEGV, -signal.SIGBUS}


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal. On Windows `isatty` is true for the device NUL too."""
    return stream.isatty() and (sys.platform != "win32" or windows.is_console(stream.fileno()))


def obeys_escapes(terminal: TextIO) -> bool:
    """Whether a terminal obeys escape sequences. Windows' consoles do only once they are asked, which this does."""
    return sys.platform != "win32" or windows.obeys_escapes(terminal.fileno())


def as_utf_8(data: bytes) -> bytes:
    """What a program wrote to a pipe or file, with text in UTF-8: Windows' own programs use the console's code page."""
    if sys.platform == "win32" and b"\0" not in data:
        try:
            data.decode()
        except UnicodeDecodeError:
            return windows.console_text(data).encode()
    return data


def reader_has_left(error: OSError) -> bool:
    """Whether writing failed because the reader of a pipe has closed it, for which Windows has no errno of its own."""
    return isinstance(error, BrokenPipeError) or (sys.platform == "win32" and error.errno == errno.EINVAL)


def terminal_restorer(terminal: int) -> Callable[[], None]:
    """A call that gives a terminal the modes that it has now, and discards what was typed and not read.

    Windows restores a console when a program ends: there it does nothing.
    """
    if sys.platform == "win32":
        return lambda: None
    import termios

    before = termios.tcgetattr(terminal)
    return lambda: termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def unbuffered_keys(terminal: int) -> Iterator[None]:
    """Within the block, a terminal passes on what is typed at once and does not show it. Not on Windows."""
    if sys.platform == "win32":
        raise NotImplementedError
    import termios
    import tty

    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def start_on_terminal(
    command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int]
) -> "tuple[subprocess.Popen[bytes], int]":
    """Start a program on a new pseudo-terminal of `size` (rows, columns).

    Returns it and the descriptor of our side, which the caller closes; reading fails when the program has ended. Not
    on Windows.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    import pty
    import termios

    ours, its = pty.openpty()
    termios.tcsetwinsize(its, size)
    process = subprocess.Popen(command, env=environment, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    return process, ours
