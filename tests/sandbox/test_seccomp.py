"""The seccomp filters, run by an independent interpreter of classic BPF, and compared with the C headers."""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from credit_trl.sandbox import seccomp

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
PID = 4242
NEVER = """
socket connect accept accept4 bind listen ptrace process_vm_readv process_vm_writev mount umount2 pivot_root
chroot unshare setns bpf perf_event_open userfaultfd keyctl add_key request_key memfd_create memfd_secret
shmget shmat msgget semget mq_open io_uring_setup io_uring_enter init_module finit_module kexec_load reboot
setuid setgid setgroups setresuid setresgid setreuid capset personality swapon quotactl mknod mknodat chown
fchown lchown fchownat setxattr seccomp open_by_handle_at name_to_handle_at pidfd_open pidfd_getfd
pidfd_send_signal sched_setaffinity setpriority sched_setscheduler ioprio_set vmsplice splice mlock mlockall
setsid setpgid setsockopt sendmsg sendmmsg
openat2 fsopen open_tree move_mount process_madvise inotify_init1 fanotify_init syslog acct settimeofday
clock_settime sethostname modify_ldt iopl ioperm
"""


def decide(program: bytes, machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Answer of a filter to a system call."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    arch = ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    accumulator, position = 0, 0
    while True:
        code, jump_true, jump_false, value = struct.unpack_from("<HBBI", program, 8 * position)
        position += 1
        if code == 0x20:  # load the word at an absolute offset
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:  # and
            accumulator &= value
        elif code == 0x06:  # return
            return value
        else:
            taken = {0x15: accumulator == value, 0x25: accumulator > value, 0x45: bool(accumulator & value)}[code]
            position += jump_true if taken else jump_false


def filters(machine: str) -> dict[str, bytes]:
    return {
        "namespace": seccomp.namespace_filter(machine),
        "landlock": seccomp.with_process_id(seccomp.landlock_filter(machine), PID),
        "old landlock": seccomp.with_process_id(seccomp.landlock_filter(machine, truncation_mediated=False), PID),
    }


def numbers(machine: str) -> dict[str, int]:
    tables = (seccomp._COMMON, seccomp._PROCESSES, seccomp._SCRATCH, seccomp._CHECKED)
    return {name: number for table in tables for name, number in seccomp.syscall_numbers(table, machine).items()}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_match_kernel_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    defined = re.findall(r"#define __NR(3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    header = {name: int(number) for _, name, number in defined}
    header.setdefault("newfstatat", header.get("fstatat", -1))
    for name, number in numbers(machine).items():
        if name in header:
            assert header[name] == number, name
    assert len(set(numbers(machine)) - set(header)) < 8  # names that the header spells otherwise or lacks


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("policy", ["namespace", "landlock", "old landlock"])
def test_filter_follows_the_tables(machine: str, policy: str) -> None:
    program = filters(machine)[policy]
    tables = [seccomp._COMMON] + ([seccomp._PROCESSES, seccomp._SCRATCH] if policy == "namespace" else [])
    allowed = {n for table in tables for n in seccomp.syscall_numbers(table, machine).values()}
    checked = set(seccomp.syscall_numbers(seccomp._CHECKED, machine).values())
    for number in (*range(600), 0x40000000, 0x40000001, 0xFFFFFFFF):
        if number in checked:
            continue
        expected = ALLOW if number in allowed else EPERM if number <= 450 else ENOSYS
        assert decide(program, machine, number) == expected, number


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_forbidden_calls_are_in_no_table(machine: str) -> None:
    assert not set(NEVER.split()) & set(numbers(machine))


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_filter_checks_arguments(machine: str) -> None:
    call = numbers(machine)
    policies = filters(machine)
    signal, thread, namespace_user = 17, 0x003D0F00, 0x10000000

    def ask(policy: str, name: str, *arguments: int) -> int:
        return decide(policies[policy], machine, call[name], *arguments)

    assert ask("namespace", "clone", signal) == ALLOW
    assert ask("namespace", "clone", thread) == ALLOW
    for call_refused in ("getxattr", "llistxattr"):
        assert ask("namespace", call_refused) == ALLOW
        assert ask("landlock", call_refused) == EPERM
    assert ask("namespace", "rt_sigaction", 17, 0) == ALLOW  # a question
    assert ask("namespace", "rt_sigaction", 17, 1) == EPERM  # SIGCHLD
    assert ask("namespace", "rt_sigaction", 17, 1 << 32) == EPERM
    assert ask("namespace", "rt_sigaction", 2, 1 << 32) == ALLOW
    assert ask("landlock", "clone", signal) == EPERM
    assert ask("landlock", "clone", thread) == ALLOW
    for policy in policies:  # a thread with descriptors of its own, which no sample would see
        assert ask(policy, "clone", thread & ~0x400) == EPERM
        assert ask(policy, "close_range", 3, 9, 0) == ALLOW
        assert ask(policy, "close_range", 3, 9, 4) == ALLOW  # CLOSE_RANGE_CLOEXEC
        assert ask(policy, "close_range", 3, 9, 2) == EPERM  # CLOSE_RANGE_UNSHARE
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, namespace_user, 0x20000000, 0x40000000):
        assert ask("namespace", "clone", flag | signal) == EPERM
    for policy in policies:
        assert ask(policy, "clone3", 0, 88) == ENOSYS
        assert ask(policy, "socketpair", 1, 1) == ALLOW
        assert ask(policy, "socketpair", 1, 1 | 0x80000 | 0x800) == ALLOW
        assert ask(policy, "socketpair", 1, 2) == EPERM
        assert ask(policy, "socketpair", 2, 1) == EPERM
        assert ask(policy, "prlimit64", 0, 7) == ALLOW
        assert ask(policy, "prlimit64", 1, 7) == EPERM
        assert ask(policy, "fcntl", 3, 1) == ALLOW
        for command in (8, 10, 15, 1024, 1026, 1031):
            assert ask(policy, "fcntl", 3, command) == EPERM
        for lock in (6, 7, 37, 38):  # F_SETLK and the like: no limit counts the memory of locks
            assert ask(policy, "fcntl", 3, lock) == EPERM
        assert ask(policy, "ioctl", 0, 0x5401) == ALLOW
        assert ask(policy, "ioctl", 0, 0x5412) == EPERM  # TIOCSTI: type on somebody's terminal
        assert ask(policy, "prctl", 15) == ALLOW
        assert ask(policy, "prctl", 1) == EPERM  # PR_SET_PDEATHSIG: outlive the server
        for private, file, shared in ((0x22, 0x01, 0x21), (0x4022, 0x03, 0x23), (0x20022, 0x02, 0x8021)):
            assert ask(policy, "mmap", 0, 4096, 3, private) == ALLOW
            assert ask(policy, "mmap", 0, 4096, 3, file) == ALLOW
            assert ask(policy, "mmap", 0, 4096, 3, shared) == EPERM  # MAP_SHARED | MAP_ANONYMOUS
            assert ask(policy, "mmap", 0, 4096, 3, private | 0x40000) == EPERM  # MAP_HUGETLB
        assert ask(policy, "madvise", 0, 4096, 4) == ALLOW
        assert ask(policy, "madvise", 0, 4096, 21) == EPERM  # MADV_PAGEOUT
        for name, flags in (("sendto", 3), ("recvfrom", 3), ("recvmsg", 2), ("recvmmsg", 3)):
            assert ask(policy, name, *[0] * flags, 0x40) == ALLOW  # MSG_DONTWAIT
            assert ask(policy, name, *[0] * flags, 0x41) == EPERM  # MSG_OOB
        for option in (3, 4, 38, 39):  # SO_TYPE, SO_ERROR, SO_PROTOCOL, SO_DOMAIN
            assert ask(policy, "getsockopt", 4, 1, option) == ALLOW
        for option in (17, 31, 59, 77):  # SO_PEERCRED, SO_PEERSEC, SO_PEERGROUPS, SO_PEERPIDFD
            assert ask(policy, "getsockopt", 4, 1, option) == EPERM
        assert ask(policy, "getsockopt", 4, 6, 3) == EPERM  # of TCP
        assert decide(policies[policy], machine, call["read"], architecture=0x40000003) == KILL
    for name in ("kill", "tgkill"):
        assert ask("landlock", name, PID, 6) == ALLOW
        for other in (PID + 1, 0, 1, 0xFFFFFFFF):
            assert ask("landlock", name, other, 6) == EPERM
    assert ask("landlock", "openat", 0, 0, os.O_TRUNC) == ALLOW
    assert ask("old landlock", "openat", 0, 0, os.O_TRUNC) == EPERM
    assert ask("old landlock", "openat", 0, 0, os.O_RDONLY) == ALLOW
