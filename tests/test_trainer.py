"""The trainer end to end: prompts, verdicts, sources of feedback and kinds of models that TRL users have."""

import copy
import dataclasses

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from credit_trl import CreditTrainer, Verdict
from tiny import length_verdicts


@pytest.fixture
def train(make_trainer):
    """Train, and keep (prompts, contexts) of each sample in `seen`."""

    def run(*arguments, **options):
        trainer = make_trainer(*arguments, **options)
        trainer.seen = []
        build = trainer.context_builder.build

        def recording(prompt, privileged, contrasts=(), *, tools=None):
            contrast_prompts = []
            recorded_contrasts = (contrast_prompts.append(contrast.prompt) or contrast for contrast in contrasts)
            built = build(prompt, privileged, recorded_contrasts, tools=tools)
            trainer.seen.append(([prompt, *contrast_prompts], built))
            return built

        trainer.context_builder.build = recording
        trainer.train()
        return trainer

    return run


def texts(trainer):
    decode = trainer.processing_class.decode
    return [[decode(ids) for ids, _ in built.sequences()] for _, built in trainer.seen if built.teacher]


def moved(trainer, make_model):
    return any(
        not torch.equal(p, q) for p, q in zip(trainer.model.parameters(), make_model().parameters(), strict=False)
    )


def static(dataset):
    return dataset.map(lambda row: {"privileged_context": f"Static for {row['answer']}."})


def equally_long(prompts, trainer):
    """Completions of one length, the digits 0 to 3 before the question."""
    tokenizer = trainer.processing_class
    encoded = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
    completed = [tokenizer(f"{i % 4}{prompt[-1]['content']}")["input_ids"] for i, prompt in enumerate(prompts)]
    return {"prompt_ids": encoded, "completion_ids": completed, "logprobs": None}


def test_a_static_column_precedes_the_feedback(train, dataset):
    for text, _ in texts(train(rows=static(dataset))):
        assert 0 < text.find("Static for") < text.find("The answer is")


def test_a_static_column_reaches_the_teacher_without_unused_columns(train, dataset):
    def no_columns(completions, **kwargs):
        assert "answer" not in kwargs
        return [0.0] * len(completions)

    all_texts = texts(train(no_columns, static(dataset), remove_unused_columns=True))
    assert all_texts
    assert all("Static for" in text for text, _ in all_texts)


def test_contrasts_of_an_evaluation_come_from_the_rows_that_it_got(train, dataset):
    trainer = train(contrastive_source="dataset", eval_strategy="no")
    trainer.seen.clear()
    trainer.evaluate(dataset.map(lambda row: {"prompt": [{"role": "user", "content": f"Held out {row['answer']}"}]}))
    assert trainer.seen
    assert all("Held out" in text and "Held out" in contrast for text, contrast in texts(trainer))


def test_a_contrast_replaces_the_question_and_keeps_the_feedback(train):
    trainer = train()
    for (prompts, _), (text, contrast) in zip(trainer.seen, texts(trainer), strict=True):
        question, other_question = prompts[0][-1]["content"], prompts[1][-1]["content"]
        assert question != other_question
        assert contrast == text.replace(question, other_question)


def test_the_teachers_prompts_have_the_date_of_their_generation_batch(train, dataset, tokenizer):
    dated = copy.deepcopy(tokenizer)
    dated.chat_template = "{{ strftime_now('%f') }}" + dated.chat_template
    trainer = train(processing_class=dated, rows=dataset.select(range(2)), max_steps=2)
    dates = [{text.split("<")[0] for text, _ in texts(trainer)[batch]} for batch in (slice(8), slice(8, 16))]
    assert all(dates)
    assert not set.intersection(*dates)


def test_feedback_only_where_no_rollout_succeeded(train):
    trainer = train(environment_feedback_only_without_solution=True)
    parts = [(b.privileged.demonstration, b.privileged.feedback) for _, b in trainer.seen]
    assert any(d for d, _ in parts)
    assert all((d is None) != (f is None) for d, f in parts)


def test_coroutines_several_functions_and_rows_that_do_not_apply(train):
    async def judge(completions, **kwargs):
        return [Verdict(1.0, "judged", {"care": 0.25}) for _ in completions]

    def half(completions, answer, **kwargs):
        return [None if int(a) % 2 else Verdict(0.0, "even") for a in answer]

    trainer = train([judge, half])
    logged = trainer.state.log_history[0]
    assert (logged["rewards/judge/mean"], logged["care"]) == (1.0, 0.25)
    assert {built.privileged.feedback for _, built in trainer.seen} <= {"judged", "judged\n\neven"}


def test_the_verifier_gets_the_truncation_flag(train, dataset):
    told = []

    def verdicts(completions, completion_ids, truncated, **kwargs):
        told.extend(zip(completion_ids, truncated, strict=True))
        return [Verdict(0.0, "x") for _ in completions]

    end = train(verdicts, dataset).processing_class.eos_token_id
    assert told
    assert all(flag == (ids[-1] != end) for ids, flag in told)


@pytest.mark.parametrize(("is_parsed", "weight"), [(False, 1.0), (True, 1.0), (False, 0.0)])
def test_unclosed_thinking_is_told_to_the_verifier_unless_trl_parses(train, tokenizer, monkeypatch, is_parsed, weight):
    told = []

    def verdicts(completions, completion_ids, **kwargs):
        told.extend((c[-1]["content"], ids) for c, ids in zip(completions, completion_ids, strict=True))
        return [Verdict(0.0, "x") for _ in completions]

    template = tokenizer.chat_template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    assert template != tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", template)
    if is_parsed:
        monkeypatch.setattr(tokenizer, "response_template", "x", raising=False)
        parsed = {"role": "assistant", "content": "parsed"}
        monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", lambda *_, **__: parsed)
    train(verdicts, distillation_weight=weight, rollout_func=None if weight else equally_long)
    assert told
    decoded = ["<think>" + tokenizer.decode(ids, skip_special_tokens=True) for _, ids in told]
    assert [text for text, _ in told] == (["parsed"] * len(told) if is_parsed else decoded)


def test_a_rollout_func_needs_no_chat_template_at_weight_0(train, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None

    def sevens(prompts, trainer):
        return {"prompt_ids": [[7]] * len(prompts), "completion_ids": [[7]] * len(prompts), "logprobs": None}

    assert train(processing_class=tokenizer, rollout_func=sevens, distillation_weight=0.0).state.global_step


def test_several_iterations_reuse_the_scores(train, make_model):
    trainer = train(num_iterations=2, max_steps=4)
    assert len(trainer.seen) == 16  # two generation batches of eight, not four
    assert moved(trainer, make_model)


def test_embeddings_of_chosen_tokens_train(train):
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 6])
    trainer = train(peft_config=config)
    trained, average = (
        trainer.model.get_parameter(f"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.{name}")
        for name in ("default", "teacher")
    )
    assert not torch.equal(trained, average)


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


def test_an_environments_reward_may_be_a_verdict(train, make_model, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = qwen3_chat_template
    model = make_model(vocab_size=len(tokenizer))
    trainer = train(None, model=model, processing_class=tokenizer, environment_factory=GuessingGame)
    assert trainer.seen
    for _, built in trainer.seen:
        assert built.privileged.feedback.startswith("The number was ")
        assert '"name": "guess"' in tokenizer.decode(built.teacher)


def test_bf16_mixed_precision_trains_with_fp32_scores(train, make_model):
    trainer, exact = train(bf16=True), train()
    assert moved(trainer, make_model)
    assert all(p.dtype is torch.float32 for p in trainer.model.parameters())
    for name in ("credit/delta_v_mean", "credit/generic_mean", "entropy"):
        mixed, full = (t.state.log_history[0][name] for t in (trainer, exact))
        assert mixed == pytest.approx(full, rel=0.1, abs=0.1), name


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_two_micro_batches_give_the_step_of_one(train, loss_type):
    """Completions of one length, so that no reduction depends on which samples share a micro-batch."""
    unsplit, parts = (
        train(loss_type=loss_type, rollout_func=equally_long, **batches).model.state_dict()
        for batches in ({}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
    )
    for name, weight in unsplit.items():
        torch.testing.assert_close(parts[name], weight, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_trainer_without_its_constructor_is_trls(make_model, make_config, dataset, tokenizer):
    """As TRL's tests build trainers: it generates, scores and computes the loss of GRPO."""
    options = make_config().to_dict()
    names = {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    plain = GRPOConfig(**{name: options[name] for name in names - {"generation_batch_size"}})
    built = GRPOTrainer(make_model(), length_verdicts, plain, dataset, processing_class=tokenizer)
    built.model.train()
    built.current_gradient_accumulation_steps = 1
    rows = [dataset[0]] * 4
    inputs = built._generate_and_score_completions(rows)
    inputs["advantages"] = torch.linspace(-1, 1, 4)
    bare = CreditTrainer.__new__(CreditTrainer)
    vars(bare).update(vars(built))
    torch.manual_seed(0)
    expected = built._generate([row["prompt"] for row in rows])
    torch.manual_seed(0)
    assert bare._generate([row["prompt"] for row in rows]) == expected
    loss = bare._compute_loss(bare.model, inputs)
    assert loss == built._compute_loss(built.model, inputs)
    assert loss.requires_grad
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    with torch.no_grad():
        logps = [
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids > 0, 3)[0] for trainer in (bare, built)
        ]
    assert torch.equal(*logps)
