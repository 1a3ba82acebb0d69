"""Checks of data and machine: an error that names the fix, before any rollout."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, IterableDataset
from trl import GRPOTrainer

from credit_trl import Verdict
from credit_trl.training.weights import reduce_gradients_in_fp32


@pytest.fixture
def no_rollout(monkeypatch):
    def generate(self, prompts):
        pytest.fail("a completion was generated before the error")

    monkeypatch.setattr(GRPOTrainer, "_generate", generate)


@pytest.mark.usefixtures("no_rollout")
def test_parameters_that_are_not_passed_are_refused(make_trainer):
    for func in (lambda prompt, **_: [], lambda completion, **_: [], lambda environments, **_: []):
        with pytest.raises(ValueError, match=r"which it is not given.*completions, log_extra.*prompts"):
            make_trainer(reward_funcs=func)


def test_reward_functions_without_required_columns_pass(make_trainer, dataset):
    class Verifier:
        def __call__(self, completions, answer=None, *, truncated, trainer_state, **columns):
            return [Verdict(1.0, "Right.") for _ in completions]

    rows = dataset.remove_columns("answer")
    make_trainer(rows=rows, reward_funcs=Verifier())
    make_trainer(rows=rows, reward_funcs=[lambda **columns: [1.0]])


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_rows_that_a_transform_forms_train(make_trainer, dataset, weight):
    def asked(rows):
        columns = {"answer": rows["answer"], "privileged_context": list(map(" ".join, rows["privileged_context"]))}
        return columns | {"prompt": [[{"role": "user", "content": f"{a}="}] for a in rows["answer"]]}

    rows = dataset.remove_columns("prompt").add_column("privileged_context", [["z"]] * len(dataset))
    rows = rows.with_transform(asked)
    trainer = make_trainer(rows=rows, distillation_weight=weight, contrastive_source="dataset", max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
    assert not Path(trainer.args.output_dir, "_rows").exists()  # which would lack the transform


@pytest.mark.parametrize(
    ("options", "warns"),
    [({}, True), ({"teacher_prompt": "student"}, False), ({"reward_weights": [1.0, 0.0]}, False)],
)
@pytest.mark.filterwarnings("ignore:A rollout is shown")
def test_summed_rewards_warn_where_one_function_may_reach_the_threshold(make_trainer, options, warns):
    functions = [lambda completions, **columns: [0.0] * len(completions)] * 2
    trainer = make_trainer(reward_funcs=functions, **options)
    assert ("summed_rewards" in trainer.alarms.raised) == warns


@pytest.mark.filterwarnings("ignore:No sample of this generation batch")
def test_rollout_func_fields_reach_reward_functions(make_trainer, tokenizer):
    def rollout(prompts, trainer):
        ids = [tokenizer("7")["input_ids"] + [tokenizer.eos_token_id] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None, "score": [0.5] * len(prompts)}

    trainer = make_trainer(lambda completions, score, **columns: score, rollout_func=rollout, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 0.5


@pytest.mark.usefixtures("no_rollout")
@pytest.mark.parametrize(("column", "value"), [("image", b"png"), ("images", [b"png"])])
def test_images_in_stream_without_columns_are_refused(make_trainer, dataset, column, value):
    rows = IterableDataset.from_generator(lambda: ({**row, column: value} for row in dataset))
    assert rows.column_names is None
    with pytest.raises(ValueError, match="`processing_class` is a tokenizer"):
        make_trainer(rows=rows).train()


def test_images_from_tools_are_refused(make_trainer, monkeypatch):
    original = GRPOTrainer._generate
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: (*original(self, prompts)[:-1], [["image"]]))
    with pytest.raises(ValueError, match="A tool returned an image"):
        make_trainer().train()


def test_fsdp_version_1_is_refused():
    plugin = SimpleNamespace(fsdp_version=2, mixed_precision_policy=None)
    accelerator = SimpleNamespace(distributed_type="FSDP", state=SimpleNamespace(fsdp_plugin=plugin))
    reduce_gradients_in_fp32(accelerator)
    plugin.fsdp_version = 1
    with pytest.raises(ValueError, match="set `fsdp_version: 2`"):
        reduce_gradients_in_fp32(accelerator)


@pytest.mark.parametrize("column", [{"images": []}, {"image": None}])
@pytest.mark.parametrize("is_stream", [False, True])
def test_empty_columns_of_images_train_beside_a_text_model(make_trainer, dataset, column, is_stream):
    examples = [row | column for row in dataset]
    rows = IterableDataset.from_generator(lambda: iter(examples)) if is_stream else Dataset.from_list(examples)
    trainer = make_trainer(rows=rows, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
