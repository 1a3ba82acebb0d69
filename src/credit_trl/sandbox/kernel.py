"""System calls that Python's standard library lacks, through ctypes."""

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long

# Options of `prctl`.
DIE_WITH_PARENT = 1  # the signal that the kernel sends to this process when its parent ends
ADOPT_ORPHANS = 36  # 1 makes it the parent of descendants whose own parent ended
NO_NEW_PRIVILEGES = 38  # 1 ignores set-user-id files and file capabilities from now on, also in its children
_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def syscall(number: int, *arguments: object) -> int:
    """Make a system call, with integers as C longs. Raises `OSError` if it fails."""
    converted = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result = _LIBC.syscall(ctypes.c_long(number), *converted)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, *arguments: object) -> None:
    """Set an option of this process. Raises `OSError` if it fails."""
    padded = [ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in arguments]
    padded += [ctypes.c_ulong(0)] * (4 - len(padded))
    if _LIBC.prctl(ctypes.c_int(option), *padded) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def install_seccomp(program: bytes) -> None:
    """Install a BPF program (`struct sock_filter[]`) for this process and its children, after `NO_NEW_PRIVILEGES`."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = _SockFprog(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    prctl(_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(fprog))
