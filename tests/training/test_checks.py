"""Checks of data and machine: an error that names the fix, before any rollout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from credit_trl import CreditTrainer, Verdict
from credit_trl.training.checks import check_machine, check_no_images, check_parts, check_prompts
from credit_trl.training.metrics import CreditWarning
from tiny import build_tokenizer, length_verdicts, save_model


@pytest.fixture
def build(make_model, make_config, tokenizer, dataset):
    def make(rows=None, reward_funcs=length_verdicts, **options):
        return CreditTrainer(
            make_model(), reward_funcs, make_config(**options), rows or dataset, processing_class=tokenizer
        )

    return make


@pytest.fixture
def no_rollout(monkeypatch):
    """Fail the test if a completion is generated."""

    def generate(self, prompts):
        pytest.fail("a completion was generated before the error")

    monkeypatch.setattr(CreditTrainer, "_generate", generate)


@pytest.mark.usefixtures("no_rollout")
@pytest.mark.parametrize("support", ["teacher_topk", "student_topk"])
def test_topk_above_vocabulary_is_refused(build, tokenizer, support):
    with pytest.raises(
        ValueError, match=rf"`distillation_topk=100000` exceeds the model's vocabulary of {len(tokenizer)}"
    ):
        build(distillation_topk=100_000, distillation_support=support)


@pytest.mark.usefixtures("no_rollout")
def test_dataset_without_prompt_column_is_refused(build, dataset):
    with pytest.raises(ValueError, match=r"no column `prompt`.*question.*rename_column"):
        build(rows=dataset.rename_column("prompt", "question"))


@pytest.mark.usefixtures("no_rollout")
def test_missing_reward_function_column_is_refused(build, dataset):
    lacks = "`length_verdicts` needs the column `answer`.*its columns are "
    with pytest.raises(ValueError, match=rf"{lacks}prompt\. Add it \(dataset.add_column\('answer'"):
        build(rows=dataset.remove_columns("answer"))
    with pytest.raises(ValueError, match=rf"{lacks}prompt, solution\..*rename_column\('solution', 'answer'\)"):
        build(rows=dataset.rename_column("answer", "solution"))


@pytest.mark.usefixtures("no_rollout")
def test_parameters_that_are_not_passed_are_refused(build):
    for func, message in (
        (lambda prompt, **_: [], r"has the parameter `prompt`.*Rename it to `prompts`"),
        (lambda completion, **_: [], r"Rename it to `completions`"),
        (lambda environments, **_: [], "needs the column `environments`"),
    ):
        with pytest.raises(ValueError, match=message):
            build(reward_funcs=func)


@pytest.mark.usefixtures("no_rollout")
@pytest.mark.parametrize("column", ["task", "privileged_context", "id"])
def test_function_without_an_argument_for_a_column_is_refused(build, dataset, column):
    def func(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
        return [0.0] * len(completions)

    build(reward_funcs=func)
    rows = dataset.add_column(column, ["x"] * len(dataset))
    with pytest.raises(ValueError, match=f"takes no argument `{column}`.*Add `\\*\\*kwargs`"):
        build(reward_funcs=func, rows=rows)
    if column == "id":
        with pytest.raises(ValueError, match="drops the column `answer`"):
            build(reward_funcs=func, rows=rows, remove_unused_columns=True)


@pytest.mark.usefixtures("no_rollout")
def test_source_without_effect_needs_no_task(build):
    for options in ({"contrastive_coef": 0.0}, {"distillation_weight": 0.0}):
        build(contrastive_source="same_task", **options)


@pytest.mark.usefixtures("no_rollout")
def test_dropping_a_reward_functions_column_is_refused(build):
    with pytest.raises(ValueError, match=r"`remove_unused_columns=True` drops the column `answer`.*Set it to False"):
        build(remove_unused_columns=True)


@pytest.mark.usefixtures("no_rollout")
def test_too_few_rows_for_generation_batch_are_refused(build, dataset):
    assert len(dataset) == 12
    trainer = build(per_device_train_batch_size=8, gradient_accumulation_steps=8)  # 64 rollouts of 16 prompts
    with pytest.raises(ValueError, match=r"has 12 rows.* 64 rollouts with `num_generations=4` needs 16, .*Add rows"):
        trainer.train()


def test_rows_of_one_generation_batch_suffice(build):
    trainer = build(per_device_train_batch_size=8, gradient_accumulation_steps=6, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


def test_reward_functions_without_required_columns_pass(build, dataset):
    class Verifier:
        def __call__(self, completions, answer=None, *, truncated, trainer_state, **columns):
            return [Verdict(1.0, "Right.") for _ in completions]

    rows = dataset.remove_columns("answer")
    build(rows=rows, reward_funcs=Verifier())
    build(rows=rows, reward_funcs=[lambda **columns: [1.0]])


def test_rollout_func_fields_reach_reward_functions(make_model, make_config, tokenizer, dataset):
    def rollout(prompts, trainer):
        ids = [tokenizer("7")["input_ids"] + [tokenizer.eos_token_id] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None, "score": [0.5] * len(prompts)}

    trainer = CreditTrainer(
        make_model(),
        lambda completions, score, **columns: score,
        make_config(max_steps=1),
        dataset,
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 0.5


@pytest.mark.usefixtures("no_rollout")
def test_evaluation_dataset_is_checked(make_model, make_config, tokenizer, dataset):
    with pytest.raises(ValueError, match=r"`eval_dataset\['harder'\]` has no column `prompt`"):
        CreditTrainer(
            make_model(),
            length_verdicts,
            make_config(),
            dataset,
            {"harder": dataset.remove_columns("prompt")},
            processing_class=tokenizer,
        )


@pytest.mark.usefixtures("no_rollout")
def test_image_columns_are_refused(build, dataset):
    with pytest.raises(ValueError, match="Prompts with images"):
        build(rows=dataset.add_column("image", [None] * len(dataset)))


@pytest.mark.usefixtures("no_rollout")
def test_images_in_messages_are_refused(build):
    content = [{"type": "image", "text": None}, {"type": "text", "text": "what is it?"}]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": content}], "answer": "x"}] * 4)
    with pytest.raises(ValueError, match="Prompts with images"):
        build(rows=rows).train()


@pytest.mark.usefixtures("no_rollout")
@pytest.mark.parametrize(("column", "value"), [("image", b"png"), ("images", [b"png"])])
def test_images_in_stream_without_columns_are_refused(build, dataset, column, value):
    rows = IterableDataset.from_generator(lambda: ({**row, column: value} for row in dataset))
    assert rows.column_names is None
    with pytest.raises(ValueError, match="Prompts with images"):
        build(rows=rows).train()


@pytest.mark.parametrize("added", [{"pixel_values": torch.zeros(8, 3)}, {"num_images": [0] * 7 + [1]}])
def test_images_from_environments_or_tools_are_refused(build, monkeypatch, added):
    original = GRPOTrainer._generate_and_score_completions
    monkeypatch.setattr(
        GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: original(self, inputs) | added
    )
    with pytest.raises(ValueError, match="environments and tools of text only"):
        build().train()


def test_empty_image_fields_pass():
    check_no_images([{"prompt": "2+2=", "image": None, "images": []}, {"images": [None], "num_images": [0, 0]}])


@pytest.mark.usefixtures("no_rollout")
def test_privileged_context_that_is_not_text_is_refused(build, dataset):
    with pytest.raises(ValueError, match=r"column `privileged_context` must hold text"):
        build(rows=dataset.add_column("privileged_context", [3] * len(dataset)))


@pytest.mark.usefixtures("no_rollout")
def test_config_of_another_trainer_is_refused(make_model, tokenizer, dataset, tmp_path):
    with pytest.raises(TypeError, match="must be a `CreditConfig`"):
        CreditTrainer(
            make_model(), length_verdicts, GRPOConfig(str(tmp_path), use_cpu=True), dataset, processing_class=tokenizer
        )


@pytest.mark.usefixtures("no_rollout")
def test_contrasts_from_streaming_dataset_are_refused(build, dataset):
    with pytest.raises(ValueError, match=r"needs a `datasets.Dataset`.*contrastive_source='none'"):
        build(rows=dataset.to_iterable_dataset(), contrastive_source="dataset")


def test_wrong_number_of_verdicts_names_function(build):
    def short_changed(completions, **kwargs):
        return [Verdict(1.0, "x")] * (len(completions) - 1)

    with pytest.raises(ValueError, match=r"'short_changed' returned 7 elements for 8 completions"):
        build(reward_funcs=short_changed).train()


def test_feedback_error_is_raised_in_reward_function(build):
    def shouting(completions, **kwargs):
        return [Verdict(1.0, ["not", "text"]) for _ in completions]

    with pytest.raises(TypeError, match="must be text or None") as raised:
        build(reward_funcs=shouting).train()
    assert any(entry.name == "shouting" for entry in raised.traceback)


def test_failing_reward_function_keeps_last_checkpoint(build, tmp_path):
    calls = []

    def fragile(completions, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("the verifier broke")
        return [Verdict(0.0, "no") for _ in completions]

    trainer = build(reward_funcs=fragile, max_steps=5, save_strategy="steps", save_steps=1)
    with pytest.raises(ZeroDivisionError, match="the verifier broke") as raised:
        trainer.train()
    assert any(entry.name == "fragile" for entry in raised.traceback)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    calls.extend([1, 1])  # repaired
    resumed = build(reward_funcs=fragile, max_steps=5, save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 5


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_version_1_is_refused(make_config, make_model, version):
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    accelerator = SimpleNamespace(distributed_type="FSDP", state=state, device=torch.device("cpu"))
    if version == 2:
        check_machine(make_config(), make_model(), accelerator)
        return
    with pytest.raises(ValueError, match="set `fsdp_version: 2`"):
        check_machine(make_config(), make_model(), accelerator)


@pytest.mark.parametrize(
    ("wrapper", "router", "optim"),
    [
        ("DEEPSPEED", False, "adamw_torch"),
        ("NO", True, "adamw_torch"),
        ("NO", False, "lomo"),
        ("NO", False, "galore_adamw_layerwise"),
    ],
)
def test_parts_are_refused_where_updates_would_differ(make_config, wrapper, router, optim):
    accelerator, args = SimpleNamespace(distributed_type=wrapper), make_config(update_batch_tokens=64, optim=optim)
    with pytest.raises(ValueError, match="Remove `update_batch_tokens` and lower `per_device_train_batch_size`"):
        check_parts(args, accelerator, router, pytest.fail)
    check_parts(make_config(), accelerator, router, pytest.fail)
    check_parts(make_config(update_batch_tokens=64), SimpleNamespace(distributed_type="FSDP"), False, pytest.fail)


def test_parts_in_vain_are_a_warning(build):
    with pytest.warns(CreditWarning, match="`update_batch_tokens` has no effect at `distillation_weight=0`"):
        build(update_batch_tokens=64, distillation_weight=0.0)


def test_beta_needs_a_model_with_a_path(make_model, make_config, tokenizer, dataset, tmp_path):
    args = make_config(beta=0.1, distillation_weight=0.5)
    with pytest.raises(ValueError, match="Pass a path or a model that was loaded from one"):
        CreditTrainer(make_model(), length_verdicts, args, dataset, processing_class=tokenizer)
    trainer = CreditTrainer(save_model(tmp_path), length_verdicts, args, dataset)
    assert trainer.ref_model is not None
    adapters = LoraConfig(target_modules=["q_proj"])
    CreditTrainer(make_model(), length_verdicts, args, dataset, processing_class=tokenizer, peft_config=adapters)


def with_prompts(dataset, first):
    return Dataset.from_list([{"prompt": first, "answer": "1"}, *dataset.select_columns(["prompt", "answer"])])


@pytest.mark.usefixtures("no_rollout")
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "system", "content": "Add."}], r"row 0 of `eval_dataset` .*needs a user turn"),
        ([], r"The prompt of row 0 of `eval_dataset` is empty \(\[\]\)"),
    ],
)
def test_evaluation_prompts_are_checked_at_construction(make_model, make_config, tokenizer, dataset, prompt, message):
    rows = with_prompts(dataset, prompt)
    with pytest.raises(ValueError, match=message):
        CreditTrainer(make_model(), length_verdicts, make_config(), dataset, rows, processing_class=tokenizer)
    with pytest.raises(ValueError, match=message.replace("eval_dataset", r"eval_dataset\['own'\]")):
        CreditTrainer(make_model(), length_verdicts, make_config(), dataset, {"own": rows}, processing_class=tokenizer)


@pytest.mark.usefixtures("no_rollout")
def test_row_without_a_prompt_is_found_in_the_middle(build, dataset):
    rows = [*dataset.select(range(5)), {"prompt": None, "answer": "1"}, *dataset.select(range(5, 12))]
    with pytest.raises(ValueError, match=r"The prompt of row 5 of `train_dataset` is empty \(None\)"):
        build(Dataset.from_list(rows))


@pytest.mark.usefixtures("no_rollout")
def test_evaluation_data_have_the_columns_of_the_reward(make_model, make_config, tokenizer, dataset):
    rows = dataset.rename_column("answer", "solution")
    with pytest.raises(ValueError, match=r"`answer`, which `eval_dataset` does not have.*rename_column"):
        CreditTrainer(make_model(), length_verdicts, make_config(), dataset, rows, processing_class=tokenizer)
    with pytest.raises(ValueError, match="`eval_dataset` has no rows"):
        CreditTrainer(
            make_model(), length_verdicts, make_config(), dataset, dataset.select([]), processing_class=tokenizer
        )


@pytest.mark.usefixtures("no_rollout")
def test_chat_template_that_refuses_a_prompt_names_the_row(make_model, make_config, dataset):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ValueError, match=r"row 0 of `train_dataset` cannot be encoded.*no system"):
        CreditTrainer(make_model(), length_verdicts, make_config(), dataset, processing_class=tokenizer)


@pytest.mark.parametrize(
    ("options", "positions", "message"),
    [
        ({}, 40, "`max_position_embeddings=40`"),
        ({"max_reprompt_len": 300}, 4096, "no teacher. Increase it"),
    ],
)
def test_long_prompts_warn_with_their_row(make_model, make_config, tokenizer, dataset, options, positions, message):
    rows = Dataset.from_list([*dataset, {"prompt": [{"role": "user", "content": "1" * 400}], "answer": "1"}])
    model = make_model(max_position_embeddings=positions)
    with pytest.warns(CreditWarning, match=r"row 12 of `train_dataset` has \d+ tokens") as caught:
        CreditTrainer(model, length_verdicts, make_config(**options), rows, processing_class=tokenizer)
    assert any(message in str(w.message) for w in caught)


def test_prompt_that_fills_the_engine_is_refused(make_config):
    args = make_config()
    args.use_vllm, args.vllm_max_model_length = True, 16
    rows = Dataset.from_list([{"prompt": "1+1="}])
    with pytest.raises(ValueError, match="row 0 of `train_dataset` has 16 tokens, and `vllm_max_model_length=16`"):
        check_prompts(args, {"train_dataset": rows}, lambda prompt: [0] * 16, 8, None, print)
