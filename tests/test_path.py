"""The way of a generation batch from its contexts to its scores passes through few files."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import credit_trl
from credit_trl.contexts.contrast import ContrastBatch
from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.loss.scores import Scores
from credit_trl.rollout.batch import GenerationBatch
from dense import step_problem

PACKAGE = Path(credit_trl.__file__).parent
CARRIERS = (GenerationBatch, ContrastBatch, TokenContexts, CompletionBatch, Scores)
HIDDEN_SIZE = 32  # of the tiny policy


def carries(value: Any) -> bool:
    """Whether a value is the batch, its contexts, hidden states (…, H) or scores, or a list of these."""
    if isinstance(value, list | tuple) and value:
        return carries(value[0])
    return isinstance(value, CARRIERS) or getattr(value, "shape", ())[-1:] == (HIDDEN_SIZE,)


def files_entered(work: Callable[[], Any]) -> list[str]:
    """Files that receive what `carries`, in order: by an argument of a public function that another file calls.

    A function counts at the first call from each file, so that loops count once; methods that read `self` do not.
    """
    seen, files = set(), []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith(("_", "<")) or str(PACKAGE) not in code.co_filename:
            return
        caller = frame.f_back.f_code.co_filename
        names = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {"self"}
        is_given = any(carries(frame.f_locals.get(name)) for name in names)
        if caller != code.co_filename and is_given and (code, caller) not in seen:
            seen.add((code, caller))
            files.append(str(Path(code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(profile)
    work()
    sys.setprofile(None)
    return [name for name, _ in itertools.groupby(files)]


def test_a_batch_passes_through_few_files(make_config, tokenizer):
    problem = step_problem(tokenizer, make_config(max_steps=1))
    path = files_entered(lambda: problem.step.prepare(problem.batch, problem.tensors))
    assert path[:2] == ["training/step.py", "contexts/gather.py"]
    assert len(set(path)) <= 8, path
    assert len(path) - len(set(path)) <= 2, path  # returns
