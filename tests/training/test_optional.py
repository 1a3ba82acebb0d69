"""Callbacks of this package: optional ones only warn, and the others say why their failure ends a run."""

import re
from pathlib import Path

import credit_trl

CALLBACK = re.compile(r'^class \w+\((.*)TrainerCallback\):\s+"""(.*?)"""', re.MULTILINE | re.DOTALL)


def test_each_callback_is_optional_or_says_why_it_ends_a_run():
    optional = []
    for path in Path(credit_trl.__file__).parent.rglob("*.py"):
        for bases, text in CALLBACK.findall(path.read_text("utf-8")):
            optional.append("OptionalEvents" in bases)
            assert optional[-1] != ("failure ends the run" in " ".join(text.split())), path
    assert {True, False} == set(optional)
