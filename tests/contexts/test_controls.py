"""Controls: a contrast with another privileged context or the teacher's own, and a teacher with a foreign one."""

from __future__ import annotations

import re

import pytest
from datasets import Dataset
from torch.testing import assert_close

from credit_trl import CreditTrainer, Verdict
from credit_trl.contexts.contrast import draw_from_batch
from credit_trl.contexts.privileged import PrivilegedContext
from tiny import context_ids


@pytest.fixture
def problems() -> Dataset:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"Problem <{i}>"}], "answer": f"({i})"} for i in range(6)]
    )


def name_answers(completions, answer, **kwargs) -> list[Verdict]:
    """Feedback that names the number of its problem; none for the rollouts of problem 0."""
    return [Verdict(0.0, None if a == "(0)" else f"Answer {a}.") for a in answer]


@pytest.fixture
def contexts_of(make_model, make_config, tokenizer, problems):
    """Builds one generation batch: a list of (problem, problem of z) pairs per sample, teacher first, or None."""

    def build(rows=range(4), **options):
        config = make_config(per_device_train_batch_size=16, max_reprompt_len=400, **options)
        trainer = CreditTrainer(make_model(), name_answers, config, problems, processing_class=tokenizer)
        trainer.model.train()
        batch = [problems[i] for i in rows for _ in range(4)]
        seen = []
        trainer._score = lambda output, contexts: seen.extend(context_ids(c) for c in contexts) or {}
        trainer._generate_and_score_completions(batch)
        texts = [None if c is None else [tokenizer.decode(ids) for ids in c] for c in seen]
        return [None if t is None else [(number("<{}>", x), number("({})", x)) for x in t] for t in texts]

    return build


def number(form: str, text: str) -> int | None:
    found = re.findall(re.escape(form).replace(r"\{\}", r"(\d)"), text)
    assert len(found) <= 1
    return int(found[0]) if found else None


def test_swapped_context_keeps_x_and_exchanges_z(contexts_of):
    contexts = contexts_of(contrastive_swap="hint", contrastive_count=2)
    for sample, context in enumerate(contexts):
        problem = sample // 4
        if problem == 0:
            assert context is None
            continue
        assert context[0] == (problem, problem)
        assert [x for x, _ in context[1:]] == [problem, problem]
        assert {z for _, z in context[1:]} == {1, 2, 3} - {problem}


def test_swapped_input_keeps_z_and_exchanges_x(contexts_of):
    for sample, context in enumerate(contexts_of(contrastive_count=3)):
        problem = sample // 4
        if problem > 0:
            assert [z for _, z in context] == [problem] * 4
            assert {x for x, _ in context[1:]} == {0, 1, 2, 3} - {problem}


def test_self_contrast_repeats_the_teachers_context(contexts_of):
    contexts = contexts_of(contrastive_swap="self")
    assert contexts[:4] == [None] * 4
    assert all(context == [(sample // 4, sample // 4)] * 2 for sample, context in enumerate(contexts) if context)


@pytest.mark.parametrize("support", ["teacher_topk", "sampled"])
def test_self_contrast_makes_the_baseline_the_teacher(make_model, make_config, tokenizer, problems, support):
    config = make_config(per_device_train_batch_size=16, contrastive_swap="self", distillation_support=support)
    trainer = CreditTrainer(make_model(), name_answers, config, problems, processing_class=tokenizer)
    trainer.model.train()
    scores = trainer._generate_and_score_completions([problems[i] for i in range(1, 5) for _ in range(4)])
    assert scores["teacher_token_logps"].abs().sum() > 0
    for name in ("logps", "token_logps"):
        assert_close(scores[f"generic_{name}"], scores[f"teacher_{name}"])


def test_foreign_context_is_shared_by_the_contrasts(contexts_of):
    contexts = contexts_of(teacher_hint="foreign", contrastive_count=1)
    for sample, (teacher, contrast) in enumerate(contexts):
        assert teacher[0] == sample // 4 != contrast[0]
        assert teacher[1] == contrast[1]
        assert teacher[1] in {1, 2, 3} - {sample // 4}
    assert len({teacher[1] for teacher, _ in contexts}) == 3


def test_foreign_contexts_and_contrasts_draw_independently(contexts_of):
    """Otherwise the contrast prompt would always be the one whose privileged context the teacher reads."""
    contexts = contexts_of(rows=range(1, 5), teacher_hint="foreign", contrastive_count=1)
    same = [teacher[1] == contrast[0] for teacher, contrast in contexts]
    assert 0 < sum(same) < len(same)


def test_foreign_and_swapped_context_compare_two_foreign_ones(contexts_of):
    contexts = contexts_of(teacher_hint="foreign", contrastive_swap="hint")
    for sample, ((teacher_x, teacher_z), (contrast_x, _)) in enumerate(contexts):
        assert teacher_x == contrast_x == sample // 4
        assert teacher_z != teacher_x


def test_only_eligible_samples_are_drawn():
    keys = ["a", "a", "b", "b", "c"]
    for step in range(20):
        draws = draw_from_batch(keys, range(5), 1, seed=0, step=step, eligible=[False, True, False, False, True])
        assert draws == [[4], [4], draws[2], draws[3], [1]]
        assert all(draw in ([1], [4]) for draw in draws[2:4])
    assert draw_from_batch(keys, [0], 1, seed=0, step=0, eligible=[True] + [False] * 4) == [[]]


@pytest.mark.parametrize("style", ["sdpo", "paper"])
@pytest.mark.parametrize("control", [{}, {"contrastive_swap": "hint"}, {"teacher_hint": "foreign"}])
def test_feedback_on_a_success_is_not_called_unsuccessful(
    make_model, make_config, tokenizer, problems, style, control
):
    """Also in the contrasts, which differ from the teacher's context in content only."""

    def first_half_succeeds(completions, **kwargs):
        return [Verdict(float(i % 4 < 2), f"Checked {i}.") for i in range(len(completions))]

    config = make_config(
        per_device_train_batch_size=16, reprompt_style=style, use_successful_as_teacher=False, **control
    )
    trainer = CreditTrainer(make_model(), first_half_succeeds, config, problems, processing_class=tokenizer)
    trainer.model.train()
    seen = []
    trainer._score = lambda output, contexts: seen.extend(context_ids(c) for c in contexts) or {}
    trainer._generate_and_score_completions([problems[i] for i in range(4) for _ in range(4)])
    failed, succeeded = {
        "sdpo": ("feedback from your unsuccessful earlier attempt:", "feedback from your earlier attempt:"),
        "paper": ("Previous assessment:", "Previous assessment:"),
    }[style]
    for sample, contexts in enumerate(seen):
        for text in map(tokenizer.decode, contexts):
            assert (succeeded if sample % 4 < 2 else failed) in text
            assert sample % 4 >= 2 or "unsuccessful" not in text


def test_swapped_context_over_budget_leaves_no_contrast(make_model, make_config, tokenizer, problems):
    trainer = CreditTrainer(make_model(), name_answers, make_config(), problems, processing_class=tokenizer)
    builder, render, prompt = trainer.context_builder, trainer._renderer(0), problems[1]["prompt"]
    short, long = PrivilegedContext(feedback="x"), PrivilegedContext(feedback="yyyyy")
    whole = builder.build_swapped(prompt, short, [short, long], render)
    assert [len(ids) - len(whole.teacher) for ids in whole.contrasts] == [0, 4]
    builder.config.max_reprompt_len = len(whole.teacher)
    assert context_ids(builder.build_swapped(prompt, short, [short, long], render)) == [whole.teacher]
    assert context_ids(builder.build_swapped(prompt, short, [short, short], render)) == [whole.teacher] * 3


def test_controls_refuse_invalid_combinations(make_config):
    with pytest.raises(ValueError, match="contrastive_source='batch'"):
        make_config(contrastive_swap="hint", contrastive_source="dataset")
    make_config(contrastive_swap="self", per_device_train_batch_size=4)  # needs no other prompt
    with pytest.raises(ValueError, match="holds one prompt"):
        make_config(teacher_hint="foreign", contrastive_coef=0.0, per_device_train_batch_size=4)
    for name in ("contrastive_swap", "teacher_hint"):
        with pytest.raises(ValueError, match=name):
            make_config(**{name: "neither"})
