"""System calls that Python's standard library lacks, through ctypes."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_MODE_FILTER = 2


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def syscall(number: int, *arguments: object) -> int:
    """Make a system call, with integers as C longs. Raises `OSError` if it fails."""
    converted = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result = _LIBC.syscall(ctypes.c_long(number), *converted)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _prctl(option: int, *arguments: object) -> None:
    padded = [ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in arguments]
    padded += [ctypes.c_ulong(0)] * (4 - len(padded))
    if _LIBC.prctl(ctypes.c_int(option), *padded) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def die_with_parent(signal: int) -> None:
    """Have the kernel send `signal` to this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    """Ignore set-user-id files and file capabilities in this process and its children from now on."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_seccomp(program: bytes) -> None:
    """Install a BPF program (`struct sock_filter[]`) for this process and its children, after `no_new_privileges`."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = _SockFprog(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(fprog))
