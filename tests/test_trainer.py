"""The trainer end to end: prompts, verdicts, sources of feedback and kinds of models that TRL users have."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig

from credit_trl import CreditConfig, CreditTrainer, Verdict
from tiny import length_verdicts


@pytest.fixture
def train(make_model, make_config, tokenizer, dataset):
    def run(reward_funcs=length_verdicts, rows=None, model=None, trainer_options=None, **options):
        trainer = CreditTrainer(
            model or make_model(),
            reward_funcs,
            make_config(**options),
            rows or dataset,
            processing_class=tokenizer,
            **(trainer_options or {}),
        )
        trainer.seen = []
        build = trainer.context_builder.build

        def recording(prompt, privileged, contrasts=(), *, tools=None):
            drawn = []
            kept = (drawn.append(one.prompt) or one for one in contrasts)
            built = build(prompt, privileged, kept, tools=tools)
            trainer.seen.append(([prompt, *drawn], built))
            return built

        trainer.context_builder.build = recording
        trainer.train()
        return trainer

    return run


def texts(trainer, tokenizer):
    return [[tokenizer.decode(ids) for ids, _ in built.sequences()] for _, built in trainer.seen if built.teacher]


def moved(trainer, make_model):
    return any(
        not torch.equal(p, q) for p, q in zip(trainer.model.parameters(), make_model().parameters(), strict=False)
    )


# The sampled token alone gives the reverse KL; the configuration refuses the rest.
@pytest.mark.parametrize(
    ("support", "alpha"),
    [*itertools.product(["teacher_topk"], [0.0, 0.3, 1.0]), ("sampled", 1.0)],
)
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_every_support_tail_and_divergence_trains(train, make_model, support, tail, alpha):
    trainer = train(
        distillation_support=support, distillation_tail=tail, distillation_alpha=alpha, contrastive_count=2
    )
    assert moved(trainer, make_model)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_plain_text_prompts(train, tokenizer):
    rows = Dataset.from_list([{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)])

    def verdicts(completions, answer, **kwargs):
        return [Verdict(0.0, f"It is {a}.") for a in answer]

    trainer = train(verdicts, rows)
    for own, contrast in texts(trainer, tokenizer):
        assert own[-4:] in {f"{i}+1=" for i in range(8)}
        assert "<|im_start|>" not in own
        assert own[:-4] == contrast[:-4]


def test_a_static_column_and_verdicts_both_reach_the_teacher(train, tokenizer, dataset):
    rows = dataset.map(lambda row: {"privileged_context": f"Static for {row['answer']}."})
    trainer = train(rows=rows)
    for own, _ in texts(trainer, tokenizer):
        assert "Static for" in own
        assert "The answer is" in own
        assert own.index("Static for") < own.index("The answer is")


def test_a_static_column_reaches_the_teacher_without_unused_columns(train, tokenizer, dataset):
    def no_columns(completions, **kwargs):
        assert "answer" not in kwargs
        return [0.0] * len(completions)

    rows = dataset.map(lambda row: {"privileged_context": f"Static for {row['answer']}."})
    trainer = train(no_columns, rows, remove_unused_columns=True)
    assert texts(trainer, tokenizer)
    assert all("Static for" in own for own, _ in texts(trainer, tokenizer))


def test_a_contrast_replaces_the_question_and_keeps_the_feedback(train, tokenizer):
    trainer = train()
    for prompts, built in trainer.seen:
        own, contrast = (tokenizer.decode(ids) for ids, _ in built.sequences())
        question, other = prompts[0][-1]["content"], prompts[1][-1]["content"]
        assert question != other
        assert contrast == own.replace(question, other)


def test_feedback_only_where_no_rollout_succeeded(train, tokenizer):
    trainer = train(environment_feedback_only_without_solution=True)
    shown = [(b.privileged.demonstration, b.privileged.feedback) for _, b in trainer.seen]
    assert any(d for d, _ in shown)
    assert all((d is None) != (f is None) for d, f in shown)


@pytest.mark.parametrize(("kept", "wanted", "unwanted"), [("solution", "42", "hm"), ("think", "hm", "42")])
def test_what_of_a_rollout_the_teacher_sees(train, tokenizer, dataset, kept, wanted, unwanted):
    def rollouts(prompts, trainer):
        encode = tokenizer.apply_chat_template
        return {
            "prompt_ids": [encode(p, add_generation_prompt=True, return_dict=True)["input_ids"] for p in prompts],
            "completion_ids": [tokenizer("<think>hm</think>42<|im_end|>")["input_ids"] for _ in prompts],
            "logprobs": None,
        }

    trainer = train(
        lambda completions, **_: [1.0] * len(completions),
        teacher_context=kept,
        trainer_options={"rollout_func": rollouts},
    )
    for own, _ in texts(trainer, tokenizer):
        section = own.split("Correct solution:")[1].split("Now solve")[0]
        assert wanted in section
        assert unwanted not in section


def test_coroutines_several_functions_and_rows_that_do_not_apply(train, tokenizer):
    async def judge(completions, **kwargs):
        return [Verdict(1.0, "judged", {"care": 0.25}) for _ in completions]

    def half(completions, answer, **kwargs):
        return [None if int(a) % 2 else Verdict(0.0, "even") for a in answer]

    trainer = train([judge, half])
    logged = trainer.state.log_history[0]
    assert logged["rewards/judge/mean"] == 1.0
    assert logged["care"] == 0.25
    feedback = {built.privileged.feedback for _, built in trainer.seen}
    assert feedback <= {"judged", "judged\n\neven"}


def test_truncation_is_told_to_the_verifier(train):
    told = []

    def verdicts(completions, completion_ids, truncated, **kwargs):
        told.extend(zip(completion_ids, truncated, strict=True))
        return [Verdict(0.0, "x") for _ in completions]

    trainer = train(verdicts)
    end = trainer.processing_class.eos_token_id
    assert told
    assert all(flag == (ids[-1] != end) for ids, flag in told)


def test_an_empty_completion_is_graded_as_not_truncated(train):
    told = []

    def verdicts(completions, truncated, **kwargs):
        told.append(truncated)
        return [1.0] * len(completions)

    trainer = train(verdicts, max_steps=1)
    batch = trainer._generation_batch
    assert batch.turn_starts == [[0]] * len(batch.prompts)  # what analyses between two steps read
    answers = [[{"role": "assistant", "content": text}] for text in ("", "7")]
    trainer._calculate_rewards(batch.rows[:2], batch.prompts[:2], answers, [[], [7]])
    assert told[-1] == [False, True]


def test_unclosed_thinking_of_the_prompt_is_told_to_the_verifier(train, tokenizer, monkeypatch):
    told = []

    def verdicts(completions, completion_ids, **kwargs):
        told.extend((c[-1]["content"], ids) for c, ids in zip(completions, completion_ids, strict=True))
        return [Verdict(0.0, "x") for _ in completions]

    template = tokenizer.chat_template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    assert template != tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", template)
    train(verdicts)
    assert told
    assert all(text == "<think>" + tokenizer.decode(ids, skip_special_tokens=True) for text, ids in told)


def test_a_streamed_column_does_not_replace_the_truncation_flag(train, dataset):
    told = []

    def verdicts(completions, completion_ids, truncated, **kwargs):
        told.extend(zip(completion_ids, truncated, strict=True))
        return [Verdict(0.0, "x") for _ in completions]

    rows = IterableDataset.from_generator(lambda: ({**row, "truncated": "no"} for row in dataset))
    assert rows.column_names is None  # the check before training reads the names of columns
    trainer = train(verdicts, rows)
    end = trainer.processing_class.eos_token_id
    assert told
    assert all(flag == (ids[-1] != end) for ids, flag in told)


@pytest.mark.parametrize("source", ["batch", "dataset"])
def test_contrast_sources(train, dataset, source):
    trainer = train(contrastive_source=source, per_device_train_batch_size=4 if source == "dataset" else 8)
    drawn = {prompts[1][-1]["content"] for prompts, _ in trainer.seen}
    in_batch = {prompts[0][-1]["content"] for prompts, _ in trainer.seen}
    if source == "batch":
        assert drawn <= in_batch
    else:
        assert not drawn <= in_batch


def test_several_iterations_reuse_the_scores(train, make_model):
    trainer = train(num_iterations=2, max_steps=4)
    assert len(trainer.seen) == 16  # two generation batches of eight, not four
    assert moved(trainer, make_model)


def test_lora_and_gradient_checkpointing(train, make_model):
    trainer = train(
        gradient_checkpointing=True, trainer_options={"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    )
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert names
    assert all("lora" in name and ".teacher" not in name for name in names)


def test_embeddings_of_chosen_tokens_train(train):
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 6])
    trainer = train(trainer_options={"peft_config": config})
    trained, average = (
        trainer.model.get_parameter(f"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.{name}")
        for name in ("default", "teacher")
    )
    assert not torch.equal(trained, average)


@dataclass
class CpuConfig(CreditConfig):
    use_cpu: bool = True
    bf16: bool | None = False


def test_default_arguments_train_eight_problems_a_step(make_model, tokenizer, dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("credit_trl.trainer.CreditConfig", CpuConfig)
    make_model().save_pretrained("model")
    tokenizer.save_pretrained("model")
    trainer = CreditTrainer("model", length_verdicts, train_dataset=dataset)
    assert trainer.args.output_dir == "model-CREDIT"
    assert trainer.args.generation_batch_size // trainer.num_generations == 8


class GuessingGame:
    """An environment that owns its reward and says what was wrong."""

    def reset(self, answer=None, **kwargs):
        self.answer = answer

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        return "higher" if number < int(self.answer) else "not higher"

    def get_reward(self):
        return Verdict(0.0, f"The number was {self.answer}.")


def test_an_environments_reward_may_be_a_verdict(make_model, make_config, tokenizer, dataset):
    import copy

    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = qwen3_chat_template
    trainer = CreditTrainer(
        make_model(vocab_size=len(tokenizer)),
        None,
        make_config(),
        dataset,
        processing_class=tokenizer,
        environment_factory=GuessingGame,
    )
    seen = []
    build = trainer.context_builder.build

    def recording(prompt, privileged, contrasts=(), *, tools=None):
        seen.append((privileged, build(prompt, privileged, contrasts, tools=tools)))
        return seen[-1][1]

    trainer.context_builder.build = recording
    trainer.train()
    assert seen
    assert all(privileged.feedback.startswith("The number was ") for privileged, _ in seen)
    for _, built in seen:
        assert '"name": "guess"' in tokenizer.decode(built.teacher)


@pytest.mark.parametrize("support", ["teacher_topk"])
def test_bf16_mixed_precision_trains_with_fp32_scores(train, make_model, support):
    trainer = train(bf16=True, distillation_support=support)
    assert moved(trainer, make_model)
    assert all(p.dtype is torch.float32 for p in trainer.model.parameters())
    exact = train(distillation_support=support)
    for name in ("credit/delta_v_mean", "credit/generic_mean", "entropy"):
        mixed, full = (t.state.log_history[0][name] for t in (trainer, exact))
        assert mixed == pytest.approx(full, rel=0.1, abs=0.1), name


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_two_micro_batches_give_the_step_of_one(make_model, make_config, tokenizer, dataset, loss_type):
    def weights(**options):
        torch.manual_seed(0)

        def rollouts(prompts, trainer):
            encode = tokenizer.apply_chat_template
            return {
                "prompt_ids": [encode(p, add_generation_prompt=True, return_dict=True)["input_ids"] for p in prompts],
                # All of one length, so that no reduction depends on which samples share a micro-batch.
                "completion_ids": [
                    tokenizer(f"{i % 4}{p[-1]['content']}")["input_ids"] for i, p in enumerate(prompts)
                ],
                "logprobs": None,
            }

        config = make_config(max_steps=2, loss_type=loss_type, **options)
        trainer = CreditTrainer(
            make_model(), length_verdicts, config, dataset, processing_class=tokenizer, rollout_func=rollouts
        )
        trainer.train()
        return trainer.model.state_dict()

    whole, parts = weights(), weights(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_underflow_debugging_does_not_see_bool_arguments(train):
    trainer = train(debug="underflow_overflow", max_steps=1)
    assert trainer.state.global_step == 1


def test_one_rollout_per_prompt_trains_from_feedback(train, make_model):
    trainer = train(num_generations=1, max_steps=6)
    assert moved(trainer, make_model)
    assert "flat_reward" not in trainer.alarms.raised
    assert trainer.state.log_history[0]["credit/frac_with_feedback"] == 1.0
