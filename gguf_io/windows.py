"""Calls of Windows' API that Python's os module lacks. For gguf_io.system, on Windows alone. Errors are OSError."""

import codecs
import ctypes
import msvcrt
import os
import subprocess
import sys
from collections.abc import Sequence
from ctypes import wintypes
from pathlib import Path
from typing import Any

from gguf_io.access import only_writer

assert sys.platform == "win32"  # for mypy, which checks the rest for Windows alone

CREATE_NEW, OPEN_EXISTING, OPEN_ALWAYS = 1, 3, 4
_GENERIC_READ, _GENERIC_WRITE = 0x80000000, 0x40000000
_SHARE_ALL = 1 | 2 | 4  # read, write, delete
_ERROR_HANDLE_EOF = 38
_INVALID_HANDLE = wintypes.HANDLE(-1).value
_THREAD_PRIORITY_LOWEST = -2

_DELETE, _SYNCHRONIZE = 0x10000, 0x100000
_RENAME_EX, _REPLACE_IF_EXISTS, _POSIX_SEMANTICS = 22, 1, 2  # FileRenameInfoEx
_SET_SPARSE = 0x900C4  # FSCTL_SET_SPARSE
_EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation
_LIMIT_PROCESS_TIME, _LIMIT_ACTIVE_PROCESS, _LIMIT_PROCESS_MEMORY = 0x2, 0x8, 0x100
_KILL_ON_JOB_CLOSE = 0x2000
_CREATE_SUSPENDED = 0x4
_FILE_OBJECT, _OWNER_AND_DACL = 1, 0x1 | 0x4
_TOKEN_QUERY, _TOKEN_USER = 0x8, 1
_OBEYS_ESCAPES = 0x4  # ENABLE_VIRTUAL_TERMINAL_PROCESSING

_kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
_advapi32 = ctypes.WinDLL("advapi32", use_last_error=True)


class _Overlapped(ctypes.Structure):
    """OVERLAPPED: where to read or write."""

    _fields_ = (
        ("internal", ctypes.c_size_t),
        ("internal_high", ctypes.c_size_t),
        ("offset", ctypes.c_uint64),
        ("event", wintypes.HANDLE),
    )


def _declared(library: ctypes.WinDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


_DWORD, _BOOL, _HANDLE, _TEXT = wintypes.DWORD, wintypes.BOOL, wintypes.HANDLE, wintypes.LPCWSTR
_ADDRESS = ctypes.c_void_p
_create_file = _declared(_kernel32, "CreateFileW", _HANDLE, _TEXT, _DWORD, _DWORD, _ADDRESS, _DWORD, _DWORD, _HANDLE)
_read_file = _declared(_kernel32, "ReadFile", _BOOL, _HANDLE, _ADDRESS, _DWORD, _ADDRESS, _ADDRESS)
_write_file = _declared(_kernel32, "WriteFile", _BOOL, _HANDLE, _ADDRESS, _DWORD, _ADDRESS, _ADDRESS)
_close_handle = _declared(_kernel32, "CloseHandle", _BOOL, _HANDLE)
_control_file = _declared(
    _kernel32, "DeviceIoControl", _BOOL, _HANDLE, _DWORD, _ADDRESS, _DWORD, _ADDRESS, _DWORD, _ADDRESS, _ADDRESS
)
_current_thread = _declared(_kernel32, "GetCurrentThread", _HANDLE)
_current_process = _declared(_kernel32, "GetCurrentProcess", _HANDLE)
_set_thread_priority = _declared(_kernel32, "SetThreadPriority", _BOOL, _HANDLE, ctypes.c_int)
_set_file = _declared(_kernel32, "SetFileInformationByHandle", _BOOL, _HANDLE, ctypes.c_int, _ADDRESS, _DWORD)
_create_job = _declared(_kernel32, "CreateJobObjectW", _HANDLE, _ADDRESS, _TEXT)
_set_job = _declared(_kernel32, "SetInformationJobObject", _BOOL, _HANDLE, ctypes.c_int, _ADDRESS, _DWORD)
_assign_to_job = _declared(_kernel32, "AssignProcessToJobObject", _BOOL, _HANDLE, _HANDLE)
_terminate_job = _declared(_kernel32, "TerminateJobObject", _BOOL, _HANDLE, wintypes.UINT)
_resume_process = _declared(ctypes.WinDLL("ntdll"), "NtResumeProcess", wintypes.LONG, _HANDLE)
_console_mode = _declared(_kernel32, "GetConsoleMode", _BOOL, _HANDLE, _ADDRESS)
_set_console_mode = _declared(_kernel32, "SetConsoleMode", _BOOL, _HANDLE, _DWORD)
_console_page = _declared(_kernel32, "GetConsoleOutputCP", wintypes.UINT)
_usual_page = _declared(_kernel32, "GetOEMCP", wintypes.UINT)
_local_free = _declared(_kernel32, "LocalFree", _HANDLE, _ADDRESS)
_security = (ctypes.c_int, _DWORD, *[_ADDRESS] * 5)
_security_of_handle = _declared(_advapi32, "GetSecurityInfo", _DWORD, _HANDLE, *_security)
_security_of_name = _declared(_advapi32, "GetNamedSecurityInfoW", _DWORD, _TEXT, *_security)
_security_text = _declared(
    _advapi32,
    "ConvertSecurityDescriptorToStringSecurityDescriptorW",
    *(_BOOL, _ADDRESS, _DWORD, _DWORD, _ADDRESS, _ADDRESS),
)
_open_token = _declared(_advapi32, "OpenProcessToken", _BOOL, _HANDLE, _DWORD, _ADDRESS)
_token_information = _declared(
    _advapi32, "GetTokenInformation", _BOOL, _HANDLE, ctypes.c_int, _ADDRESS, _DWORD, _ADDRESS
)
_sid_text = _declared(_advapi32, "ConvertSidToStringSidW", _BOOL, _ADDRESS, _ADDRESS)


def open_file(path: Path, disposition: int, *, writes: bool) -> int:
    """Open a file so that others may rename and delete it meanwhile, which `os.open` does not allow.

    disposition: CREATE_NEW, OPEN_EXISTING or OPEN_ALWAYS. Returns a descriptor.
    """
    name = os.fspath(path)
    if "\0" in name:
        raise ValueError("embedded null character")
    access = _GENERIC_READ | (_GENERIC_WRITE if writes else 0)
    handle = _create_file(name, access, _SHARE_ALL, None, disposition, 0, None)
    if handle == _INVALID_HANDLE:
        raise _error(name)
    try:
        return msvcrt.open_osfhandle(handle, os.O_BINARY | os.O_NOINHERIT | (os.O_RDWR if writes else os.O_RDONLY))
    except BaseException:
        _close_handle(handle)
        raise


def read_at(fd: int, target: memoryview, offset: int) -> int:
    """Read bytes at an offset into a writable buffer; return how many, 0 at the file's end."""
    buffer = (ctypes.c_char * len(target)).from_buffer(target)
    return _transfer(_read_file, fd, buffer, len(target), offset)


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Write bytes at an offset; return how many."""
    return _transfer(_write_file, fd, bytes(data), len(data), offset)


def _transfer(call: Any, fd: int, buffer: Any, size: int, offset: int) -> int:
    count, where = wintypes.DWORD(), _Overlapped(offset=offset)
    if not call(msvcrt.get_osfhandle(fd), buffer, size, ctypes.byref(count), ctypes.byref(where)):
        if ctypes.get_last_error() == _ERROR_HANDLE_EOF:
            return 0
        raise _error()
    return count.value


def replace_open(source: str, target: str) -> None:
    """Rename a file, replacing one that is open with all sharing: its readers keep the old one. (Windows 10, NTFS)"""
    name = os.path.abspath(target).encode("utf-16-le")
    handle = _create_file(source, _DELETE | _SYNCHRONIZE, _SHARE_ALL, None, OPEN_EXISTING, 0, None)
    if handle == _INVALID_HANDLE:
        raise _error(source)
    try:
        # FILE_RENAME_INFO: flags, the folder's handle, the name's bytes, the name.
        size = _Rename.name.offset + len(name) + 2
        data = ctypes.create_string_buffer(max(size, ctypes.sizeof(_Rename)))
        about = _Rename.from_buffer(data)
        about.flags, about.name_bytes = _REPLACE_IF_EXISTS | _POSIX_SEMANTICS, len(name)
        ctypes.memmove(ctypes.addressof(data) + _Rename.name.offset, name, len(name))
        if not _set_file(handle, _RENAME_EX, data, size):
            raise _error(source)
    finally:
        _close_handle(handle)


def make_sparse(fd: int) -> None:
    """Let what is not written of a file take no disk space. Raises OSError where the file system cannot, as FAT."""
    count = wintypes.DWORD()
    if not _control_file(msvcrt.get_osfhandle(fd), _SET_SPARSE, None, 0, None, 0, ctypes.byref(count), None):
        raise _error()


def lower_thread_priority() -> None:
    """Let the calling thread run only when others do not need the processor much."""
    _set_thread_priority(_current_thread(), _THREAD_PRIORITY_LOWEST)


def is_console(fd: int) -> bool:
    """Whether a descriptor is a console's; other devices have no mode."""
    return bool(_console_mode(msvcrt.get_osfhandle(fd), ctypes.byref(wintypes.DWORD())))


def obeys_escapes(fd: int) -> bool:
    """See gguf_io.system.obeys_escapes."""
    handle, mode = msvcrt.get_osfhandle(fd), wintypes.DWORD()
    obeys = _console_mode(handle, ctypes.byref(mode)) and mode.value & _OBEYS_ESCAPES
    return bool(obeys or _set_console_mode(handle, mode.value | _OBEYS_ESCAPES))


def console_text(data: bytes) -> str:
    """Decode by the console's code page, or by the one that consoles begin with if this process has none."""
    return codecs.code_page_decode(_console_page() or _usual_page(), data, "replace", True)[0]


class _Rename(ctypes.Structure):
    """FILE_RENAME_INFO."""

    _fields_ = (
        ("flags", wintypes.DWORD),
        ("folder", wintypes.HANDLE),
        ("name_bytes", wintypes.DWORD),
        ("name", ctypes.c_wchar),
    )


class _Limits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = (
        ("process_time", ctypes.c_int64),  # in 100 ns
        ("job_time", ctypes.c_int64),
        ("flags", wintypes.DWORD),
        ("least_working_set", ctypes.c_size_t),
        ("most_working_set", ctypes.c_size_t),
        ("most_processes", wintypes.DWORD),
        ("affinity", ctypes.c_size_t),
        ("priority", wintypes.DWORD),
        ("scheduling", wintypes.DWORD),
        ("input_output", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("peak_process_memory", ctypes.c_size_t),
        ("peak_job_memory", ctypes.c_size_t),
    )


class Job:
    """A job object: processes that end together, at the latest with the process that made it."""

    def __init__(self) -> None:
        self._handle = _create_job(None, None)
        if not self._handle:
            raise _error()
        self._limits = _Limits(flags=_KILL_ON_JOB_CLOSE)
        self._set()

    def start(self, command: str | Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start a program as a member, in a process group of its own. options: those of Popen."""
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | _CREATE_SUSPENDED
        process = subprocess.Popen(command, creationflags=flags, **options)
        handle = int(process._handle)  # type: ignore[attr-defined]
        try:
            self._add(handle)
        except BaseException:
            process.kill()
            raise
        _resume_process(handle)  # only now can it start others, which are members too
        return process

    def add_this_process(self, memory_bytes: int) -> None:
        """Make this process the only member, and bound its memory: allocations beyond it fail.

        Closing the job, as the system does while the process ends, then does not kill it: Wine 8's server would crash.
        """
        self._limits.flags = _LIMIT_PROCESS_MEMORY | _LIMIT_ACTIVE_PROCESS
        self._limits.process_memory, self._limits.most_processes = memory_bytes, 1
        self._set()
        self._add(_current_process())

    def limit_processor_time(self, seconds: float) -> None:
        """End each member when it has used so much user time since its start; 0 removes the limit."""
        self._limits.flags &= ~_LIMIT_PROCESS_TIME
        if seconds:
            self._limits.flags |= _LIMIT_PROCESS_TIME
            self._limits.process_time = int(seconds * 1e7)
        self._set()

    def end(self) -> None:
        """Kill all members."""
        _terminate_job(self._handle, 1)

    def __del__(self) -> None:
        if self._handle:
            _close_handle(self._handle)

    def _add(self, process: int) -> None:
        if not _assign_to_job(self._handle, process):
            raise _error()

    def _set(self) -> None:
        size = ctypes.sizeof(self._limits)
        if not _set_job(self._handle, _EXTENDED_LIMITS, ctypes.byref(self._limits), size):
            raise _error()


_own_job: list[Job] = []


def confine(memory_bytes: int) -> None:
    """See gguf_io.system.confine_this_process."""
    job = Job()
    job.add_this_process(memory_bytes)
    _own_job.append(job)


def limit_processor_time(seconds: float) -> None:
    """See gguf_io.system.limit_processor_time."""
    for job in _own_job:
        job.limit_processor_time(os.times().user + seconds if seconds else 0)


def is_private(place: Path | int) -> bool:
    """See gguf_io.system.is_private: by the owner and the access list, as text in SDDL."""
    descriptor, text = ctypes.c_void_p(), ctypes.c_void_p()
    wanted = (_FILE_OBJECT, _OWNER_AND_DACL, None, None, None, None, ctypes.byref(descriptor))
    if isinstance(place, int):
        failed = _security_of_handle(msvcrt.get_osfhandle(place), *wanted)
    else:
        failed = _security_of_name(str(place), *wanted)
    if failed:
        raise OSError(None, ctypes.FormatError(failed).strip(), None, failed)
    try:
        if not _security_text(descriptor, 1, _OWNER_AND_DACL, ctypes.byref(text), None):
            raise _error()
        try:
            return only_writer(ctypes.wstring_at(text.value or 0), _user_sid())
        finally:
            _local_free(text)
    finally:
        _local_free(descriptor)


def _user_sid() -> str:
    """This process's user, as S-1-5-21-..."""
    token, size = wintypes.HANDLE(), wintypes.DWORD()
    if not _open_token(_current_process(), _TOKEN_QUERY, ctypes.byref(token)):
        raise _error()
    try:
        _token_information(token, _TOKEN_USER, None, 0, ctypes.byref(size))
        user = ctypes.create_string_buffer(size.value)
        if not _token_information(token, _TOKEN_USER, user, size, ctypes.byref(size)):
            raise _error()
    finally:
        _close_handle(token)
    text = ctypes.c_void_p()
    # TOKEN_USER begins with a pointer to the SID
    if not _sid_text(ctypes.cast(user, ctypes.POINTER(ctypes.c_void_p))[0], ctypes.byref(text)):
        raise _error()
    try:
        return ctypes.wstring_at(text.value or 0)
    finally:
        _local_free(text)


def _error(name: str | None = None) -> OSError:
    code = ctypes.get_last_error()
    return OSError(None, ctypes.FormatError(code).strip(". \r\n"), name, code)
