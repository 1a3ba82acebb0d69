"""Checks for contrast sources, token weights and tasks, built-in or in a file of one's own.

Each check raises an `AssertionError`, or the error that a run would raise.
"""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from itertools import islice, repeat
from threading import Barrier
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import Contrast, ContrastBatch, Source, draw_contrasts
from credit_trl.contexts.prompts import is_prompt
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.loss.token_weight import TokenCredit, TokenWeight, weigh_tokens
from credit_trl.quickstart_model import model_path
from credit_trl.rollout.batch import GenerationBatch
from credit_trl.rollout.verdict import Verdict, as_verdicts
from credit_trl.tasks.registry import as_task, load_task
from credit_trl.tasks.task import Task
from credit_trl.teacher.models import make_teacher
from credit_trl.training.checks import check_column_names
from credit_trl.training.loop import LoopSample, prompt_ids, sample_tensors
from credit_trl.training.step import CreditStep
from credit_trl.trl_parity import dense_logps

_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name the capital city of France."}]
_PROMPTS = [_CHAT, "What is 17 times 3? Answer:", [{"role": "user", "content": "Sort 3, 1 and 2."}], "The vowel is"]
_SHOWN = [
    [{"role": "user", "content": [{"type": "image", "image": f"{name}.png"}, {"type": "text", "text": "What is it?"}]}]
    for name in ("cat", "dog")
]
# Responses that no verifier may crash on, take long for, or reward.
ADVERSARIAL_RESPONSES = (
    *("", " \n", "\x00", "\ud800", "<|im_end|>", "{prompt} {0} {", "<think>", "</think>", "\\boxed{", "```python\n"),
    *("(" * 100_000, "9" * 100_000, "\\frac{" * 10_000, "a " * 500_000, "🙂" * 100_000, "<answer>" * 10_000),
)
_SHORT_RESPONSES = ("", "\x00", "\ud800")  # of every row of the sample
_ROWS = 200  # of the sample
_MAX_SECONDS = 10.0  # of one adversarial response


def check_source(source: Source, columns: Mapping[str, Sequence[Any]] | None = None) -> None:
    """Check a contrast source on a batch of 12 samples: six prompts, two with an image, with two rollouts each.

    The first rollout of a prompt is successful. The draws depend on seed, batch index and sample alone, leave the
    batch unchanged, are never the sample's own prompt with its own z, and some sample has one. `columns` are dataset
    columns that it takes, of 12 entries each.
    """
    prompts = []
    rollouts = []
    privileged = []
    for i in range(12):
        prompts.append([*_PROMPTS, *_SHOWN][i // 2])
        rollouts.append(PrivilegedContext(f"Answer {i}.", f"Feedback on rollout {i}."))
        demonstration = f"Answer {i - 1}." if i % 2 else None
        privileged.append(PrivilegedContext(demonstration, f"Feedback on rollout {i}."))
    successes = [True, False] * 6
    batch = ContrastBatch(5, 2, prompts, prompts, privileged, rollouts, successes, _PROMPTS, dict(columns or {}))
    original = deepcopy(batch)

    def drawn(sample: int) -> list[Contrast]:
        return list(islice(draw_contrasts(source, batch, sample, seed=7), 5))

    draws = [drawn(sample) for sample in range(12)]
    again = [drawn(sample) for sample in reversed(range(12))][::-1]  # as another process, in another order
    assert draws == again, "The source returned another draw for the same sample. Draw from `rng`, and keep no state."
    assert batch == original, "The source changed the batch. Copy what it changes."
    assert any(draws), "The source returned no contrast for any sample."


def check_weight(weight: TokenWeight) -> None:
    """Check a token weight on the credit of a small model in fp64, with S beyond ±1 and NaN at masked entries.

    It may weigh the distillation loss, GRPO's, or both. Two processes weigh as one does. Loss and gradients of
    `CreditStep` equal those of dense passes.
    """
    seen: list[TokenCredit] = []
    model, step = _small_step(lambda credit: seen.append(credit) or weight(credit))
    texts = ["Paris it is.", "London", "First 1, then 2", "It is 3, 2 or 1"]
    answers = step.context_builder.tokenizer(texts)["input_ids"]
    questions = [_PROMPTS[0], _PROMPTS[0], _PROMPTS[2], _PROMPTS[2]]
    feedback = [f"Rollout {i} is not right." for i in range(4)]
    samples = list(map(LoopSample, questions, answers, repeat(Verdict(0.0))))
    batch = GenerationBatch([{}] * 4, questions, answers, [1.0, 0.0, 1.0, 0.0], feedback, first=0, group_size=2)
    tensors = sample_tensors(step, samples)
    tensors["advantages"] = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    inputs = tensors | step.prepare(batch, tensors)
    loss = step.loss(model, inputs).terms.loss
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)

    mask = tensors["completion_mask"].bool()
    divergence = torch.zeros(mask.shape, dtype=torch.float64)
    for i, contexts in enumerate(step.build_contexts(batch)):
        f, g = (dense_logps(step.teacher.model, ids, answers[i]).detach() for ids, _ in contexts.sequences())
        p = dense_logps(model, prompt_ids(step, questions[i]), answers[i])
        divergence[i, mask[i]] = (p.exp() * (p - f + step.config.contrastive_coef * g)).sum(-1)
    names = ("teacher_logps", "generic_logps", "specific", "delta_v", "entropy")
    credit = replace(seen[0], **{name: getattr(seen[0], name).where(mask, math.nan) for name in names})
    assert credit.specific[mask].abs().max() > 1.0
    weights = weigh_tokens(weight, credit)
    assert weights, "The token weight returned no loss. Return weights of 'distillation' or of 'grpo'."
    _check_processes(weight, credit, weights)
    expected = (divergence * weights.get("distillation", 1.0))[mask].sum() / mask.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-8, atol=1e-8, msg=lambda m: f"The weighted loss differs: {m}")
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, parameters), rtol=1e-6, atol=1e-9)
    if "grpo" in weights:
        weighted = tensors["advantages"][:, None] * weights["grpo"]
        torch.testing.assert_close(inputs["advantages"][mask], weighted[mask])


def _small_step(weight: TokenWeight) -> tuple[torch.nn.Module, CreditStep]:
    path = model_path("quickstart")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    loss = {"distillation_topk": None, "contrastive_coef": 0.4, "loss_type": "bnpo"}
    loss["distillation_weight"] = 0.5  # computes each loss that a weight may weigh
    machine = {"use_cpu": True, "bf16": False, "report_to": "none", "packed": False}  # exact, row by row
    config = CreditConfig("unused", **loss, **machine, per_device_train_batch_size=4, num_generations=2)
    teacher = make_teacher("base", model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.model.parameters():
            parameter += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator).double()
    builder = ContextBuilder(AutoTokenizer.from_pretrained(path), config)
    return model, CreditStep(config, builder, teacher, token_weight=weight)


def _check_processes(weight: TokenWeight, credit: TokenCredit, expected: Mapping[str, Tensor]) -> None:
    """Compare weights with those of two processes, which have one sample and the others."""
    barrier = Barrier(2, timeout=10.0)
    sums: dict[int, Tensor] = {}

    def weigh(rank: int) -> dict[str, Tensor]:
        def reduce(values: Tensor) -> Tensor:
            sums[rank] = values
            barrier.wait()
            total = sums[0] + sums[1]
            barrier.wait()
            return total

        rows = slice(0, 1) if rank == 0 else slice(1, None)
        tensors = {name: value[rows] for name, value in vars(credit).items() if isinstance(value, Tensor)}
        return weigh_tokens(weight, replace(credit, **tensors, reduce=reduce))

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(weigh, range(2)))
    for loss, values in expected.items():
        joined = torch.cat([part[loss] for part in parts])
        torch.testing.assert_close(joined, values, msg=lambda m: f"Two processes weigh differently: {m}")


def check_task(task: Any, split: str = "train", **options: Any) -> None:
    """Check a task: a registry name, `"module:name"`, a module, or an object with `build` and `verify`.

    Hostile responses neither crash the verifier nor take long nor succeed; the same holds for an answer inside
    thinking that is not closed. A verdict does not depend on the other responses of its batch.

    A sample of up to 200 rows is graded with short responses, the first of them also with long ones.

    Args:
        task: the task.
        split: split to build.
        options: options of `build`, such as `path`.
    """
    task = load_task(task) if isinstance(task, str) else as_task(task, getattr(task, "__name__", "task"))
    rows = _sample_rows(task.build(split, **options))
    assert rows, f"The split {split!r} is empty."
    check_column_names(f"The split {split!r}", rows[0])
    for number, row in rows.items():
        assert is_prompt(row["prompt"]), f"The prompt is {row['prompt']!r:.60}. Give text, or messages with roles."
        try:
            _check_row(task, row, ADVERSARIAL_RESPONSES if number == 0 else _SHORT_RESPONSES)
        except Exception as error:
            error.add_note(f"in row {number} of the split {split!r}")
            raise


def _sample_rows(dataset: Any) -> dict[int, dict[str, Any]]:
    """Rows by number: the first, and others evenly over the data; of a stream the first ones."""
    if not hasattr(dataset, "__len__"):
        return dict(enumerate(islice(dataset, _ROWS)))
    step = max(1.0, len(dataset) / _ROWS)
    numbers = {int(i * step) for i in range(min(_ROWS, len(dataset)))}
    return {number: dataset[number] for number in sorted(numbers)}


def _check_row(task: Task, row: Mapping[str, Any], responses: Sequence[str]) -> None:
    def grade(*responses: str) -> list[Verdict]:
        columns = {name: [value] * len(responses) for name, value in row.items() if name != "prompt"}
        columns["completions"] = [[{"role": "assistant", "content": response}] for response in responses]
        return as_verdicts(task.name, task.reward(**columns, truncated=[False] * len(responses)), columns)

    hostile = [*responses, f"<think>{row['answer']}", f"<think>So \\boxed{{{row['answer']}}}"]
    together = grade(*hostile)
    for response, expected in zip(hostile, together, strict=True):
        subject = f"The response {response[:20]!r} of {len(response)} characters"
        started = time.monotonic()
        (verdict,) = grade(response)
        seconds = time.monotonic() - started
        assert seconds < _MAX_SECONDS, f"{subject} took {seconds:.1f} s. Bound what the verifier reads."
        assert verdict == expected, f"{subject} has another verdict beside other responses."
        assert not float(verdict) >= 1.0, f"{subject} is successful."
