"""Seccomp filters: allowlists of the system calls of a sandboxed program, assembled to classic BPF.

Namespaces and Landlock restrict what a system call reaches; the filter restricts which calls a program can make at
all. A call that is not listed fails with EPERM. A number newer than the table fails with ENOSYS, so that the C library
uses an older call. A call of another architecture (32-bit calls on a 64-bit kernel) kills the process.

Both tiers have the same policy, so that a program has the same outcome in both: it has threads but starts no process,
signals itself only, and neither changes a file nor reads its extended attributes.

Deliberately absent: `socket`, `connect` and `bind` (network namespaces do not cover AF_VSOCK or AF_ALG),
`memfd_create` and System V and POSIX shared memory (no limit counts their memory), `setsid` and `setpgid` (kernels may
divide processor time by session), `setsockopt` (it enlarges buffers) and `sendmsg` (it hides sockets in sockets),
`ptrace`, `process_vm_*`, `unshare`, `setns`, `mount` and its successors, `keyctl`, `bpf`, `perf_event_open`,
`io_uring_*`, `userfaultfd`, `vmsplice`, and every call that changes another process's scheduling or affinity. Likewise
`mmap` gives no anonymous shared memory, whose pages stay allocated when they no longer count as resident, and no huge
pages, which never count, and `madvise` swaps no pages out. Sockets take no out-of-band data (`MSG_OOB`, the source of
several faults of kernels) and do not name the process at their other end (`SO_PEERPIDFD` and the like).
"""

import errno
import fcntl
import os
import platform
import socket
import struct
import termios
from collections.abc import Collection

from credit_trl.sandbox.protocol import SandboxError

# Name, number on x86_64, number on aarch64 ("-" if the call does not exist).
_CALLS = """
read 0 63; write 1 64; open 2 -; openat 257 56; close 3 57; readv 19 65; writev 20 66;
pread64 17 67; pwrite64 18 68; preadv 295 69; pwritev 296 70; preadv2 327 286; pwritev2 328 287; lseek 8 62;
sendfile 40 71; stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79; statx 332 291; statfs 137 43; fstatfs 138 44;
access 21 -; faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getdents 78 -; getdents64 217 61;
getcwd 79 17; chdir 80 49; fchdir 81 50; umask 95 166; flock 73 32; fsync 74 82; fdatasync 75 83; fadvise64 221 223;
readahead 187 213; mmap 9 222; mprotect 10 226; munmap 11 215; mremap 25 216; madvise 28 233; msync 26 227; brk 12 214;
rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; rt_sigpending 127 136; rt_sigtimedwait 128 137;
rt_sigsuspend 130 133; sigaltstack 131 132; signalfd 282 -; signalfd4 289 74; pause 34 -; alarm 37 -; getitimer 36 102;
setitimer 38 103; timer_create 222 107; timer_settime 223 110; timer_gettime 224 108; timer_getoverrun 225 109;
timer_delete 226 111; timerfd_create 283 85; timerfd_settime 286 86; timerfd_gettime 287 87; nanosleep 35 101;
clock_nanosleep 230 115; clock_gettime 228 113; clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153;
dup 32 23; dup2 33 -; dup3 292 24; pipe 22 -; pipe2 293 59; select 23 -; pselect6 270 72; poll 7 -; ppoll 271 73;
epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; epoll_pwait2 441 441;
eventfd 284 -; eventfd2 290 19; sendto 44 206; recvfrom 45 207; recvmsg 47 212; recvmmsg 299 243; shutdown 48 210;
getsockname 51 204; getpeername 52 205; getsockopt 55 209;
futex 202 98; futex_waitv 449 449; set_robust_list 273 99; set_tid_address 218 96; rseq 334 293; membarrier 324 283;
sched_yield 24 124; restart_syscall 219 128; arch_prctl 158 -; getpid 39 172; getppid 110 173; gettid 186 178;
getpgid 121 155; getpgrp 111 -; getsid 124 156; getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177;
getresuid 118 148; getresgid 120 150; getgroups 115 158; getrlimit 97 163; setrlimit 160 164; getrusage 98 165;
getpriority 140 141; sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120;
sched_get_priority_max 146 125; sched_get_priority_min 147 126; sysinfo 99 179; uname 63 160; getcpu 309 168;
getrandom 318 278; execve 59 221; wait4 61 260; waitid 247 95; exit 60 93; exit_group 231 94;
clone 56 220; clone3 435 435; close_range 436 436; ioctl 16 29; fcntl 72 25; prctl 157 167; prlimit64 302 261;
socketpair 53 199; kill 62 129; tgkill 234 131
"""
_NEWEST = 450  # larger numbers are newer than the table

_AUDIT_ARCH = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_GREATER = 0x15, 0x25
Instruction = tuple[int, int, int, int]
_ALLOW: Instruction = (_RETURN, 0, 0, 0x7FFF0000)
_KILL_PROCESS: Instruction = (_RETURN, 0, 0, 0x80000000)
_REFUSE: Instruction = (_RETURN, 0, 0, 0x00050000 | errno.EPERM)
_UNKNOWN: Instruction = (_RETURN, 0, 0, 0x00050000 | errno.ENOSYS)
_WHOLE = 0xFFFFFFFF

_CLONE_THREAD, _CLONE_FILES = 0x00010000, 0x00000400
_CLOSE_RANGE_UNSHARE = 2
_CLONE_NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000
_F_GETPIPE_SZ, _F_GET_SEALS = 1032, 1034
# Without F_SETOWN, F_SETSIG (signals to other processes), F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, and locks of byte
# ranges: the kernel stores any number of them for a file.
_FCNTL_COMMANDS = (
    *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL),
    *(_F_GETPIPE_SZ, _F_GET_SEALS),
)
_IOCTL_REQUESTS = (
    *(termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD, termios.FIONBIO, termios.FIOCLEX, termios.FIONCLEX),
)
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
_MADV_PAGEOUT = 21
# Of SOL_SOCKET: SO_TYPE, SO_ERROR, SO_SNDBUF, SO_RCVBUF, SO_ACCEPTCONN, SO_PROTOCOL, SO_DOMAIN.
_SOCKET_OPTIONS = (3, 4, 7, 8, 30, 38, 39)
_PRCTL_OPTIONS = (15, 16)  # PR_SET_NAME, PR_GET_NAME

# Placeholder of the program's own process id; see `with_process_id`.
_PROCESS_ID = 0x5AFEC0DE


def syscall_numbers(machine: str) -> dict[str, int]:
    """Numbers by name of the listed calls that exist on `machine` (`"x86_64"`, `"aarch64"`)."""
    column = 1 + _AUDIT_ARCH[machine][1]
    rows = [row.split() for row in _CALLS.split(";")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def program_filter(machine: str | None = None, *, truncation_mediated: bool = True) -> bytes:
    """The policy as `struct sock_filter[]`: threads but no processes, signals to itself only, no file changes.

    The process must complete the result with its own id, see `with_process_id`. A Landlock older than version 3
    (`truncation_mediated=False`) lets a program that may only read a file truncate it, so the filter refuses O_TRUNC.
    """
    checks = _argument_checks()
    if not truncation_mediated:
        checks |= {"open": _require(1, os.O_TRUNC, 0), "openat": _require(2, os.O_TRUNC, 0)}
    return _assemble(machine or platform.machine(), checks)


def with_process_id(program: bytes, process_id: int) -> bytes:
    """The result of `program_filter` for the process with this id."""
    return program.replace(struct.pack("<I", _PROCESS_ID), struct.pack("<I", process_id))


def _argument_checks() -> dict[str, list[Instruction]]:
    """Instructions by the name of a call, which is allowed unless one of them refuses it."""
    thread = _CLONE_THREAD | _CLONE_FILES  # neither a process, nor a thread with descriptors of its own
    return {
        "clone": _require(0, thread | _CLONE_NAMESPACES, thread),
        "kill": _require(0, _WHOLE, _PROCESS_ID),
        "tgkill": _require(0, _WHOLE, _PROCESS_ID),
        "ioctl": _require_any(1, _WHOLE, _IOCTL_REQUESTS),
        "fcntl": _require_any(1, _WHOLE, _FCNTL_COMMANDS),
        "prctl": _require_any(0, _WHOLE, _PRCTL_OPTIONS),
        "prlimit64": _require(0, _WHOLE, 0),  # this process's own limits only
        # SOCK_STREAM only: a datagram pair could send to any socket file it can name.
        "socketpair": [*_require(0, _WHOLE, socket.AF_UNIX), *_require(1, 0xF, socket.SOCK_STREAM)],
        # Not shared and anonymous at once.
        "mmap": [
            *_require(3, _MAP_HUGETLB, 0),
            *_require_any(3, _MAP_SHARED | _MAP_ANONYMOUS, (0, _MAP_SHARED, _MAP_ANONYMOUS)),
        ],
        **{name: _require(3, socket.MSG_OOB, 0) for name in ("sendto", "recvfrom", "recvmmsg")},
        "recvmsg": _require(2, socket.MSG_OOB, 0),
        "getsockopt": [*_require(1, _WHOLE, socket.SOL_SOCKET), *_require_any(2, _WHOLE, _SOCKET_OPTIONS)],
        "close_range": _require(2, _CLOSE_RANGE_UNSHARE, 0),
        "madvise": [_load(2), (_JUMP_EQUAL, 0, 1, _MADV_PAGEOUT), _REFUSE],
        # Its flags are in memory, which a filter cannot read. The C library then uses clone.
        "clone3": [_UNKNOWN],
    }


def _load(index: int) -> Instruction:
    """Load the low word of an argument, which comes first (little-endian)."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _require(index: int, mask: int, value: int) -> list[Instruction]:
    """Refuse the call unless the masked bits of an argument's low word are this value."""
    return _require_any(index, mask, [value])


def _require_any(index: int, mask: int, values: Collection[int]) -> list[Instruction]:
    """Refuse the call unless the masked bits of an argument's low word are one of these values."""
    jumps = [(_JUMP_EQUAL, len(values) - position, 0, value) for position, value in enumerate(values)]
    return [_load(index), (_AND, 0, 0, mask), *jumps, _REFUSE]


def _assemble(machine: str, checks: dict[str, list[Instruction]]) -> bytes:
    """Assemble the checked calls and then the list: the kernel caches constant answers, and filters the others."""
    if machine not in _AUDIT_ARCH:
        raise SandboxError(
            f"The system call filter knows {', '.join(_AUDIT_ARCH)}, not {machine}. Use a remote sandbox."
        )
    numbers = syscall_numbers(machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine][0]),
        _KILL_PROCESS,
        (_LOAD, 0, 0, 0),
        (_JUMP_GREATER, 0, 1, _NEWEST),
        _UNKNOWN,
    ]
    for name, block in checks.items():
        if name in numbers:  # newer architectures have no `open`
            program += [(_JUMP_EQUAL, 0, len(block) + 1, numbers[name]), *block, _ALLOW]
    for name, number in numbers.items():
        if name not in checks:
            program += [(_JUMP_EQUAL, 0, 1, number), _ALLOW]
    program.append(_REFUSE)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
