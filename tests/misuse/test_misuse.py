"""Mistakes are one clear error, or warning, with the value and the remedy; the table is `mistakes.yaml`."""

import builtins
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from datasets import Dataset, DatasetDict, IterableDataset
from peft import AdaLoraConfig, LoraConfig, PromptTuningConfig

from credit_trl import CreditConfig, CreditTrainer, Verdict
from credit_trl.training.metrics import CreditWarning
from tables import says_what_to_do
from tiny import build_model, build_tokenizer, length_verdicts

TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text("utf-8"))


def questions(prompt=None, **columns) -> Dataset:
    prompts = [prompt or [{"role": "user", "content": f"{i}+1="}] for i in range(12)]
    return Dataset.from_dict({"prompt": prompts, "answer": ["1"] * 12, **{n: [v] * 12 for n, v in columns.items()}})


def stream(*rows: dict) -> IterableDataset:
    """A stream that does not tell its columns."""
    return IterableDataset.from_generator(lambda: iter(rows * 12))


def compiled_in_place() -> torch.nn.Module:
    model = build_model(build_tokenizer())
    model.compile()
    return model


def compiled_layer() -> torch.nn.Module:
    model = build_model(build_tokenizer())
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


def user(content) -> list:
    return [{"role": "user", "content": content}]


def tokenizer_ending(token: str | None) -> transformers.PreTrainedTokenizerFast:
    """The tiny tokenizer with another EOS; its template ends turns with <|im_end|>."""
    tokenizer = build_tokenizer()
    tokenizer.eos_token = token
    return tokenizer


def t5() -> torch.nn.Module:
    sizes = {"vocab_size": 259, "d_model": 32, "d_ff": 48, "num_layers": 1, "num_heads": 2, "d_kv": 16}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def verdicts(**fields):
    return lambda completions, **columns: [Verdict(0.0, **fields) for _ in completions]


def with_row(index: int, prompt, rows: Dataset | None = None) -> Dataset:
    """The questions with another prompt in a row."""
    rows = rows or questions()
    return rows.map(lambda row, i: row | ({"prompt": prompt} if i == index else {}), with_indices=True)


OBJECTS = {
    "rows without a prompt": lambda: questions().remove_columns("prompt"),
    "rows without an answer": lambda: questions().remove_columns("answer"),
    "splits": lambda: DatasetDict(train=questions()),
    "list of rows": lambda: questions().to_list(),
    "a row without a prompt": lambda: with_row(5, None),
    "an empty prompt": lambda: with_row(5, "", questions("1+1=")),
    "one row of the system": lambda: with_row(7, [{"role": "system", "content": "x"}]),
    "no rows": lambda: questions().take(0),
    "weight of another loss": lambda: lambda credit: {"grpo": 1.0 + credit.entropy},
    "a tensor of weights": lambda: lambda credit: 1.0 + credit.entropy,
    "stream": lambda: questions().to_iterable_dataset(),
    "evaluation without a prompt": lambda: {"harder": questions().remove_columns("prompt")},
    "reward of a missing column": lambda: lambda completions, solution, **_: [1.0 for _ in completions],
    "reward of the answer": lambda: lambda completions, answer, **_: [1.0 for _ in completions],
    "verifier of text": lambda: lambda completions, **_: [float(c.strip() == "1") for c in completions],
    "search in text": lambda: lambda completions, **_: [float(bool(re.search("1", c))) for c in completions],
    "no return": lambda: lambda completions, **_: None,
    "one reward": lambda: lambda completions, **_: [1.0],
    "text as reward": lambda: lambda completions, **_: ["1"] * len(completions),
    "reward that is not finite": lambda: lambda completions, **_: [float("nan")] * len(completions),
    "reward without keywords": lambda: lambda completions: [1.0 for _ in completions],
    "verifier of messages": lambda: lambda completions, **_: [float(c[-1]["content"] == "1") for c in completions],
    "no feedback": lambda: lambda completions, **_: [0.0] * len(completions),
    "encoder-decoder": t5,
    "cut": lambda: build_model(build_tokenizer()),
    "bf16": lambda: build_model(build_tokenizer(), dtype=torch.bfloat16),
    "other end": lambda: tokenizer_ending("<|endoftext|>"),
    "other end of the model": lambda: build_model(tokenizer_ending("<|endoftext|>")),
    "ordinary end": lambda: tokenizer_ending("a"),
    "no end": lambda: tokenizer_ending(None),
    "two functions": lambda: [length_verdicts, verdicts()],
    "a log of the trainer": lambda: lambda completions, log_extra, **_: log_extra("feedback", completions),
    "LoRA of the head": lambda: LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"),
    "AdaLoRA": lambda: AdaLoraConfig(r=4, target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM"),
    "a class of models": lambda: transformers.Qwen3ForCausalLM,
    "a class of verifiers": lambda: type("Verifier", (), {"__call__": lambda self, **columns: [0.0]}),
    "a class of options": lambda: CreditConfig,
    "a dictionary": dict,
    "compiled": lambda: torch.compile(build_model(build_tokenizer())),
    "compiled in place": compiled_in_place,
    "frozen": lambda: build_model(build_tokenizer()).requires_grad_(False),
    "tokenizer of another model": lambda: build_tokenizer(merges=[("a", "b"), ("b", "a"), ("c", "a"), ("c", "b")]),
    "a weight without arguments": lambda: lambda: {},
    "a weight of two arguments": lambda: lambda credit, power: {},
    "weight that fails": lambda: lambda credit: {"distillation": credit.entropy / (1 // 0)},
    "set of text": lambda: lambda completions, **_: [float(len(set(c))) for c in completions],
    "first character": lambda: lambda completions, **_: [float(c[0].lower() == "1") for c in completions],
    "second index": lambda: lambda completions, **_: [float(c[0][0] == "1") for c in completions],
    "key of no column": lambda: lambda completions, **columns: columns["solution"],
    "large reward": lambda: lambda completions, **_: [1e38 for _ in completions],
    "huge reward": lambda: lambda completions, **_: [1e39 for _ in completions],
    "stream of json text": lambda: stream({"prompt": '[{"role": "user", "content": "1+1="}]', "answer": "2"}),
    "stream without a prompt": lambda: stream({"question": "1+1=", "answer": "2"}),
    "stream of none": lambda: stream({"prompt": None, "answer": "2"}),
    "stream of numbers as feedback": lambda: stream({"prompt": "1+1=", "answer": "2", "privileged_context": 3}),
    "stream of truncated": lambda: stream({"prompt": "1+1=", "answer": "2", "truncated": True}),
    "stream of one message": lambda: stream({"prompt": '{"role": "user", "content": "1+1="}', "answer": "2"}),
    "stream of nothing": lambda: stream(),
    "stream of no rows": lambda: stream(3),
    "stream that fails": lambda: IterableDataset.from_generator(lambda: iter([1 / 0])),
    "stream without a column later": lambda: stream({"prompt": user("1+1="), "answer": "2"}, {"prompt": user("2+1=")}),
    "stream of two forms": lambda: stream({"prompt": user("1"), "answer": "2"}, {"prompt": "text", "answer": "2"}),
    "compiled layer": compiled_layer,
    "reward above every float": lambda: lambda completions, **_: [10**400 for _ in completions],
    "stream that changes": lambda: stream({"prompt": user("1+1="), "answer": "2"}, {"prompt": 3, "answer": "2"}),
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def made(argument: str, value):
    """The object of an argument in the table."""
    if isinstance(value, dict) and argument != "args":
        return {"train_dataset": questions, "reward_funcs": verdicts}[argument](**value)
    return OBJECTS[value]() if isinstance(value, str) and value in OBJECTS else value


def rows(section: str) -> pytest.MarkDecorator:
    ids = [str({k: v for k, v in row.items() if k != "says"}) for row in TABLE[section]]
    return pytest.mark.parametrize("row", TABLE[section], ids=ids)


@pytest.fixture
def build(make_config, tokenizer):
    def make(row) -> CreditTrainer:
        row_arguments = {name: made(name, value) for name, value in row.get("arguments", {}).items()}
        arguments = {"args": make_config(**row.get("options", {})), "reward_funcs": length_verdicts}
        arguments |= {"train_dataset": questions(), "processing_class": tokenizer}
        return CreditTrainer(**{"model": build_model(tokenizer), **arguments, **row_arguments})

    return make


def refuses(row):
    return pytest.raises(getattr(builtins, row["error"]), match=".*".join(map(re.escape, row["says"][:1])))


def assert_says(row, text: str) -> None:
    assert [part for part in row["says"] if part not in text] == [], text
    assert says_what_to_do(text), text


@rows("config")
def test_option_is_refused_at_construction(make_config, row):
    with refuses(row) as error:
        make_config(**row["options"])
    assert_says(row, str(error.value))


@rows("trainer")
@pytest.mark.usefixtures("unharmed")
@pytest.mark.filterwarnings("ignore:Generation ends at")
def test_argument_is_refused_before_a_completion_is_generated(build, row):
    with refuses(row) as error:
        build(row)
    assert_says(row, str(error.value))


@rows("step")
@pytest.mark.usefixtures("unharmed")
def test_mistake_of_a_run_ends_its_first_step(build, row):
    with refuses(row) as error:
        build(row).train(resume_from_checkpoint=row.get("resume"))
    assert_says(row, str(error.value))


@rows("warning")
def test_first_step_warns(build, row):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = build({**row, "options": {"max_steps": 1} | row.get("options", {})})
        if row.get("trains", True):
            trainer.train()
    texts = [str(warning.message) for warning in caught if warning.category is CreditWarning]
    assert any(all(part in text for part in row["says"]) for text in texts), texts
