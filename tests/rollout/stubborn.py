"""Reward functions that a thread limit cannot end, imported by name in a process of their own."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from itertools import repeat

from credit_trl import Verdict, in_process

REGEX = re.compile("(a+)+$")


@in_process
def graded(completions, answer, log_metric=None, **columns):
    """Length of each completion that is the answer; `columns` is in the feedback."""
    if log_metric is not None:
        log_metric("verifier_calls", 1.0)
    said = f"{sorted(columns)} in {os.getpid()}"
    return [Verdict(float(c == a), said, {"length": len(c)}) for c, a in zip(completions, answer, strict=True)]


@in_process
def matches(completions, **columns):
    """A regular expression, which keeps the interpreter lock."""
    return [float(bool(REGEX.match(text))) for text in completions]


@in_process
def matches_aloud(completions, **columns):
    print(os.getpid(), flush=True)
    return [float(bool(REGEX.match(text))) for text in completions]


@in_process
def one_long_call(completions, **columns):
    return [float(sum(repeat(1, int(text)))) for text in completions]


@in_process
async def slow_coroutine(completions, **columns):
    if "hang" in completions:
        time.sleep(600)  # blocks the event loop
    await asyncio.sleep(0)
    return [1.0] * len(completions)


@in_process
def lazy(completions, **columns):
    """A generator, which does its work after it has returned."""
    for text in completions:
        while text == "hang":
            pass
        yield 1.0


class JudgeError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


ENDINGS = {
    "raises": lambda: 1 / 0,
    "raises its own": lambda: (_ for _ in ()).throw(JudgeError(503, "busy")),
    "exits": lambda: os._exit(3),
    "leaves": lambda: exit(0),
    "crashes": lambda: os.kill(os.getpid(), 11),
    "connection": lambda: (_ for _ in ()).throw(ConnectionResetError("by the judge")),
    "no pickle": lambda: [lambda: 1],
}


@in_process
def ends(completions, **columns):
    return ENDINGS[completions[0]]() if completions[0] in ENDINGS else [1.0]


@in_process
def starts_another(completions, **columns):
    """Starts a process, writes its number into the file that the completion names, and hangs."""
    child = subprocess.Popen(["sleep", "600"])
    with open(completions[0], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
