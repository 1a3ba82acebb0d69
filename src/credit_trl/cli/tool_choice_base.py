"""Warm-up of a small language model on the form of the task `tool_choice`, before reinforcement learning.

SmolLM2-135M-Instruct follows no answer format and does not look a letter up in a list. The warm-up teaches both and
little of the task. A step has rows of three kinds:

- form: a few requests and calls without feedback, again and again; the call is right in half of them, since a base
  that sees right calls alone learns part of the task;
- look-up: a letter and an argument in place of a request, and the call of that letter's tool with the argument;
- feedback: prompts as the teacher reads them, whose feedback names a tool *drawn at random* (scrambled), and the call
  of that tool. They teach reading the feedback, and nothing about which tool suits a request.

Arguments of look-up and feedback rows are random words: with the few of the training split the model would learn them
by heart instead of copying.

Under feedback the original model opens its answers with sentences such as "The correct answer is C." The warm-up keeps
some of them: it samples answers of the original model to prompts with feedback, and where the first sentence is short,
the row's response is that sentence and then the call. The words are the model's own, so no opening is planted.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm.auto import tqdm

from credit_trl.contexts.prompts import user_text, with_user_text
from credit_trl.evaluation.engines import file_fingerprint
from credit_trl.tasks import tool_choice
from credit_trl.tasks.cache import cache_directory, cached

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from credit_trl.config import CreditConfig

ANSWER_TOKENS = 24
# First sentence of an answer, where it ends within `opening_tokens`.
_FIRST_SENTENCE = re.compile(r"[^\n()]*?\w[^\n()]*?[.!?](?=\s|$)")


@dataclass(frozen=True)
class WarmUp:
    """Settings of a warm-up; a changed setting gives another base in the cache.

    Args:
        form_batch, lookup_batch, feedback_batch: rows of a step by kind.
        learning_rate: peak of a linear warm-up over a tenth of the steps and a linear decay.
        form_rows: different rows of form with the right call, and as many with the call of an offered tool at random.
        stated_share: share of the rows with feedback whose feedback states the call instead of the letter.
        opening_share: share of the rows with feedback that have an opening of the original model.
        opening_prompts: prompts to which the original model writes openings; about a third of them are kept.
        opening_tokens: maximum number of tokens of a kept opening.
        seed: seed of rows, openings and order.
    """

    steps: int = 48
    form_batch: int = 1
    lookup_batch: int = 10
    feedback_batch: int = 6
    learning_rate: float = 1e-4
    form_rows: int = 12
    stated_share: float = 0.15
    opening_share: float = 0.1
    opening_prompts: int = 48
    opening_tokens: int = 14
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.form_batch, self.lookup_batch, self.feedback_batch) < 1:
            raise ValueError(f"A warm-up has at least one step and one row of each kind, got {self}.")

    def digest(self, model: str) -> str:
        """12 hex digits of settings, precision, the task's tables, and the weights of a directory or the hub name."""
        weights = file_fingerprint(Path(model)) if Path(model).is_dir() else model
        tables = (tool_choice.TOOLS, tool_choice.ARGUMENTS, tool_choice.PROBLEMS)
        content = json.dumps([asdict(self), has_fast_bf16("cpu"), weights, tables], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class WarmUpRow:
    """One example: the text of the prompt, control tokens included, and the response without its end of turn."""

    prompt: str
    response: str


class RowSource:
    """Draws the rows of a warm-up; the original model writes the openings."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: CreditConfig, settings: WarmUp
    ) -> None:
        self.rng = random.Random(f"warm-up/{settings.seed}")
        self.tokenizer, self.config, self.settings = tokenizer, config, settings
        wordings = [wording for tool in tool_choice.TOOLS for wording in tool_choice.wordings_of(tool, "train")]
        words = sorted(set(re.findall(r"[A-Za-z]+", " ".join(wordings))))
        self.words = [*words, *(word.capitalize() for word in words)]
        tools = [tool for _ in range(settings.form_rows) for tool in tool_choice.TOOLS][: settings.form_rows]
        right = [tool_choice.draw_request(self.rng, tool) for tool in tools]
        others = [tool_choice.draw_request(self.rng, tool) for tool in tools]
        requests = [*right, *(replace(request, tool=self.rng.choice(request.options)) for request in others)]
        self.forms = [WarmUpRow(_render(tokenizer, r.prompt), f"{r.tool}({r.argument})") for r in requests]
        plain = [self.feedback() for _ in range(settings.opening_prompts)]
        prompts = [row.prompt for row in plain]
        answers = _sample(model, tokenizer, prompts, settings.opening_tokens, "openings of the original model")
        self.opened = [
            replace(row, response=f"{found[0].strip()}\n{row.response}")
            for row, answer in zip(plain, answers, strict=True)
            if (found := _FIRST_SENTENCE.match(answer))
        ]

    def draw(self) -> dict[str, list[WarmUpRow]]:
        """Rows of one step by kind."""
        settings = self.settings
        is_opened = [self.rng.random() < settings.opening_share for _ in range(settings.feedback_batch)]
        return {
            "form": self.rng.sample(self.forms, settings.form_batch),
            "look-up": [self.lookup() for _ in range(settings.lookup_batch)],
            "feedback": [
                self.rng.choice(self.opened) if opened and self.opened else self.feedback() for opened in is_opened
            ],
        }

    def lookup(self) -> WarmUpRow:
        """A letter and an argument, and the call of the letter's tool."""
        request, gold = self._scrambled()
        content = f'{tool_choice.correction(gold)} The argument is "{request.argument}".'
        prompt = [request.prompt[0], {"role": "user", "content": content}]
        return WarmUpRow(_render(self.tokenizer, prompt), f"{request.tool}({request.argument})")

    def feedback(self) -> WarmUpRow:
        """A request whose feedback names one of its four tools at random, and the call of that tool."""
        request, gold = self._scrambled()
        kind = "stated" if self.rng.random() < self.settings.stated_share else "letter"
        words = [self.rng.choice(tool_choice.PROBLEMS), tool_choice.correction(gold, kind)]
        prompt = with_feedback(request.prompt, " ".join(filter(None, words)), self.config)
        return WarmUpRow(_render(self.tokenizer, prompt), f"{request.tool}({request.argument})")

    def _scrambled(self) -> tuple[tool_choice.ToolRequest, dict[str, str]]:
        """A request with one of its options at random as the right tool, and its gold answer.

        The argument is one or two words of the wordings, upper case or not.
        """
        request = tool_choice.draw_request(self.rng, self.rng.choice(list(tool_choice.TOOLS)))
        argument = " ".join(self.rng.choice(self.words) for _ in range(self.rng.randint(1, 2)))
        text = request.text.replace(request.argument, argument)
        request = replace(request, tool=self.rng.choice(request.options), argument=argument, text=text)
        return request, json.loads(request.answer)


def with_feedback(prompt: list[dict[str, str]], feedback: str, config: CreditConfig) -> list[dict[str, str]]:
    """A prompt as the teacher reads it with this feedback."""
    section = config.feedback_template.format(feedback_raw=feedback)
    turn = config.reprompt_template.format(prompt=user_text(prompt), solution="", feedback=section)
    return with_user_text(prompt, turn)


@functools.cache
def has_fast_bf16(device_type: str) -> bool:
    """Whether a product in bf16 takes at most three times the time of fp32.

    A CPU without instructions for bf16 takes many times as long. Another device is not measured. Times are processor
    time, which other processes of the machine do not lengthen, so that all ranks come to the same result.
    """
    if device_type != "cpu":
        return True
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(128, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
        rounds = []
        for _ in range(8):
            start = time.process_time()
            left @ right
            rounds.append(time.process_time() - start)
        times[dtype] = min(rounds)
    return times[torch.bfloat16] <= 3 * times[torch.float32]


def mixed_precision(device_type: str) -> torch.autocast:
    """Autocast to bf16, which does nothing where bf16 is slow."""
    return torch.autocast(device_type, torch.bfloat16, enabled=has_fast_bf16(device_type))


def _render(tokenizer: PreTrainedTokenizerBase, prompt: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)


@torch.no_grad()
def _sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], tokens: int, title: str
) -> list[str]:
    """One response to each rendered prompt at temperature 1."""
    texts = []
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": tokens}
    with torch.random.fork_rng(), mixed_precision(model.device.type):
        torch.manual_seed(0)
        for start in tqdm(range(0, len(prompts), 32), desc=title, unit="batch"):
            rows = list(prompts[start : start + 32])
            batch = tokenizer(rows, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
            ids = model.generate(**batch, **sampling)[:, batch["input_ids"].shape[1] :]
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return texts


def train_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: RowSource, settings: WarmUp
) -> None:
    """Train on the responses of the rows in mixed precision; each row has the same weight.

    The logits of the prompts are not computed: with a vocabulary of 49,152 they cost a fifth of a step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    ramp = max(1, settings.steps // 10)
    model.train()
    for step in (bar := tqdm(range(settings.steps), desc="warm-up", unit="step")):
        rate = min((step + 1) / ramp, (settings.steps - step) / (settings.steps - ramp + 1))
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate
        kinds = source.draw()
        count = sum(map(len, kinds.values()))
        with mixed_precision(model.device.type):  # casts each weight once for all kinds
            losses = {kind: _response_loss(model, tokenizer, rows) for kind, rows in kinds.items()}
        sum(losses[kind] * len(rows) / count for kind, rows in kinds.items()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix({kind: f"{loss:.2f}" for kind, loss in losses.items()})
    model.eval()


def _response_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[WarmUpRow]
) -> torch.Tensor:
    """Mean over rows of the mean negative log-likelihood of a response's tokens and its end of turn."""
    texts = [f"{row.prompt}{row.response}{tokenizer.eos_token}" for row in rows]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    lengths = [len(tokenizer(row.prompt, add_special_tokens=False)["input_ids"]) for row in rows]
    positions = torch.arange(batch["input_ids"].shape[1])
    is_response = (positions >= torch.tensor(lengths)[:, None]) & batch["attention_mask"].bool()
    hidden = model.base_model(**batch).last_hidden_state  # the kinds differ in length, so each has a pass of its own
    logits = model.get_output_embeddings()(hidden[:, :-1][is_response[:, 1:]])
    losses = torch.nn.functional.cross_entropy(logits.float(), batch["input_ids"][is_response], reduction="none")
    weights = is_response / is_response.sum(1, keepdim=True)
    return (losses * weights[is_response]).sum() / len(rows)


def warmed_up_base(name: str, settings: WarmUp | None = None) -> Path:
    """Directory of the warmed-up base of a model, by path or hub name, in the cache; made on first use."""
    settings = settings or WarmUp()
    directory = cache_directory() / "tool_choice" / settings.digest(name)
    return cached(directory, lambda empty: _make_base(name, empty, settings))


def _make_base(name: str, directory: Path, settings: WarmUp) -> None:
    """Write the warmed-up base and its settings to a directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from credit_trl.config import CreditConfig

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    config = CreditConfig(str(directory), use_cpu=True, bf16=False, report_to="none", contrastive_coef=0.0)
    train_rows(model, tokenizer, RowSource(model, tokenizer, config, settings), settings)
    accuracy = base_accuracy(model, tokenizer, config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    record = {"model": name, "settings": asdict(settings), "accuracy": accuracy}
    (directory / "warm_up.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def base_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: CreditConfig
) -> dict[str, float]:
    """avg@1 at temperature 1 on the held-out requests, without feedback and with each kind of feedback."""
    rows = tool_choice.build("test").to_list()
    accuracy = {}
    for kind in ("none", *tool_choice.OPTION.values):
        prompts = [row["prompt"] for row in rows]
        if kind != "none":
            verdicts = [tool_choice.verify("", row["answer"], feedback=kind) for row in rows]
            prompts = [
                with_feedback(prompt, verdict.feedback, config)
                for prompt, verdict in zip(prompts, verdicts, strict=True)
            ]
        rendered = [_render(tokenizer, prompt) for prompt in prompts]
        texts = _sample(model, tokenizer, rendered, ANSWER_TOKENS, f"accuracy, feedback: {kind}")
        rewards = [tool_choice.verify(text, row["answer"]).reward for text, row in zip(texts, rows, strict=True)]
        accuracy[kind] = sum(rewards) / len(rows)
    return accuracy


def describe_base(directory: Path) -> str:
    """Line with the accuracy of a base that `warmed_up_base` made."""
    record = json.loads((directory / "warm_up.json").read_text(encoding="utf-8"))
    found = {kind: f"{100 * value:.0f} %" for kind, value in record["accuracy"].items()}
    return (
        f"Base {directory}: {found['none']} of the held-out requests without feedback, {found['letter']} with the "
        f"letter as feedback, {found['stated']} with the call stated."
    )
