"""The seccomp filters, run by an independent interpreter of classic BPF, and compared with the C headers."""

import errno
import os
import re
import struct
import tomllib
from pathlib import Path

import pytest

from credit_trl.sandbox import seccomp

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
pytestmark = pytest.mark.parametrize("machine", ARCHITECTURES)
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
PID = 4242
CALLS = tomllib.loads(Path(__file__).with_name("system_calls.toml").read_text("utf-8"))
NEVER = set(CALLS.pop("never").split())


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
            is_taken = {0x15: accumulator == value, 0x25: accumulator > value, 0x45: bool(accumulator & value)}[code]
            position += jump_true if is_taken else jump_false


def filter_of(machine: str, **options: bool) -> bytes:
    return seccomp.with_process_id(seccomp.program_filter(machine, **options), PID)


def numbers(machine: str) -> dict[str, int]:
    return seccomp.syscall_numbers(machine)


def test_numbers_match_kernel_headers(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    defined = re.findall(r"#define __NR(3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    header = {name: int(number) for _, name, number in defined}
    header.setdefault("newfstatat", header.get("fstatat", -1))
    for name, number in numbers(machine).items():
        if name in header:
            assert header[name] == number, name
    assert len(set(numbers(machine)) - set(header)) < 8  # names that the header spells otherwise or lacks


def test_filter_follows_the_table(machine):
    program = filter_of(machine)
    allowed = set(numbers(machine).values())
    checked = {numbers(machine).get(name) for name in seccomp._argument_checks()}
    for number in (*range(600), 0x40000000, 0x40000001, 0xFFFFFFFF):
        if number in checked:
            continue
        expected = ALLOW if number in allowed else EPERM if number <= 450 else ENOSYS
        assert decide(program, machine, number) == expected, number


def test_forbidden_calls_are_in_no_table(machine):
    assert not NEVER & set(numbers(machine))


def test_filter_checks_arguments(machine):
    call = numbers(machine)
    values = {"PID": PID, "OTHER": PID + 1}
    answers = {"allowed": ALLOW, "refused": EPERM, "unknown": ENOSYS}
    for answer, rows in CALLS.items():
        for name, *arguments in rows:
            values_of_arguments = [values.get(argument, argument) for argument in arguments]
            assert decide(filter_of(machine), machine, call[name], *values_of_arguments) == answers[answer], (
                name,
                arguments,
            )


@pytest.mark.parametrize("mediated", [True, False])
def test_filter_of_an_old_landlock_refuses_to_truncate(machine, mediated):
    program = filter_of(machine, truncation_mediated=mediated)
    for flags, answer in ((os.O_TRUNC, ALLOW if mediated else EPERM), (0, ALLOW)):
        assert decide(program, machine, numbers(machine)["openat"], 0, 0, flags) == answer


def test_calls_of_another_architecture_kill(machine):
    assert decide(filter_of(machine), machine, numbers(machine)["read"], architecture=0x40000003) == KILL
