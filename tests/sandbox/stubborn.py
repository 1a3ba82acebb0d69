"""Reward functions that a thread limit cannot end, imported by name in a process of their own."""

import asyncio
import os
import re
import subprocess
import time
from itertools import repeat

from credit_trl import Verdict, in_process


@in_process
def graded(completions, answer, **columns):
    said = f"{sorted(columns)} in {os.getpid()}"
    return [Verdict(float(c == a), said, {"length": len(c)}) for c, a in zip(completions, answer, strict=True)]


class JudgeError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


def throw(error: Exception) -> None:
    raise error


def hang_with_a_child() -> None:
    print(os.getpid(), subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)


DEEDS = {
    "regular expression": lambda: print(os.getpid(), flush=True) or re.match("(a+)+$", "a" * 40 + "b"),
    "long call of C": lambda: sum(repeat(1, 20_000_000_000)),
    "processes": hang_with_a_child,
    "raises": lambda: 1 / 0,
    "raises its own": lambda: throw(JudgeError(503, "busy")),
    "connection": lambda: throw(ConnectionResetError("by the judge")),
    "exits": lambda: os._exit(3),
    "leaves": lambda: exit(0),
    "crashes": lambda: os.kill(os.getpid(), 11),
    "no pickle": lambda: [lambda: 1],
    "slow": lambda: time.sleep(2.0) or [0.0],
    "fine": lambda: [1.0],
    "view": lambda: {"score": 1.0}.values(),
}


@in_process
def does(completions, **columns):
    return DEEDS[completions[0]]()


@in_process
async def blocks_its_event_loop(completions, **columns):
    await asyncio.sleep(0 if completions == ["fine"] else time.sleep(600))
    return [1.0]


@in_process
def yields(completions, **columns):
    """Does its work after it has returned."""
    while completions != ["fine"]:
        pass
    yield 1.0
