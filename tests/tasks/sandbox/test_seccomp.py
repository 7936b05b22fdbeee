"""The filter of system calls, run through a small interpreter of classic BPF."""

import errno
import struct
from typing import Any

import pytest

from headway.tasks.sandbox.seccomp import program, refused

ALLOWED, KILLED = "allowed", "killed"
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
READ = {"x86_64": 0, "aarch64": 63}
CLONE = {"x86_64": 56, "aarch64": 220}
PRLIMIT = {"x86_64": 302, "aarch64": 261}

machines = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


def judge(machine: str, number: int, first: int = 0, audit: int | None = None) -> Any:
    """What the kernel would do with a call: allow it, kill the process, or an error number."""
    data = struct.pack("<IIQ6Q", number, AUDIT[machine] if audit is None else audit, 0, first, 0, 0, 0, 0, 0)
    code = program(machine)
    operations = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    at = accumulator = 0
    while True:
        kind, if_true, if_false, value = operations[at]
        at += 1
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif kind == 0x06:
            outcome = {0x7FFF0000: ALLOWED, 0x80000000: KILLED}
            return outcome.get(value, value & 0xFFFF)
        else:
            truth = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[kind]
            at += if_true if truth else if_false


@machines
def test_every_refused_call_is_refused_and_ordinary_ones_are_not(machine: str) -> None:
    assert len(refused(machine)) > 80
    assert {judge(machine, number) for number in refused(machine).values()} == {errno.EPERM}
    assert judge(machine, READ[machine]) == ALLOWED


@machines
def test_a_thread_may_start_and_a_process_may_not(machine: str) -> None:
    assert judge(machine, CLONE[machine], first=0x3D0F00) == ALLOWED
    assert judge(machine, CLONE[machine], first=17) == errno.EPERM
    assert judge(machine, 435) == errno.ENOSYS, "clone3 hides its flags from filters"


@machines
def test_only_our_own_limits_can_be_set(machine: str) -> None:
    assert judge(machine, PRLIMIT[machine], first=0) == ALLOWED
    assert judge(machine, PRLIMIT[machine], first=42) == errno.EPERM


@machines
def test_calls_newer_than_the_table_and_other_conventions_are_refused(machine: str) -> None:
    assert judge(machine, 463) == errno.ENOSYS
    assert judge(machine, READ[machine], audit=0x40000003) == KILLED, "32-bit calls have other numbers"
    assert judge("x86_64", 0x40000000) == KILLED


def test_an_unknown_processor_has_no_filter() -> None:
    assert program("riscv64") == b""
