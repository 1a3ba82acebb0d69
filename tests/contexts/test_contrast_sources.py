"""Contrast sources beside the batch: nearest prompts, prompts of the same task, and no prompt."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl import CreditTrainer
from credit_trl.contexts.contrast import (
    ContrastSource,
    draw_contrasts,
    draw_from_batch,
    draw_nearest,
    draw_privileged_contexts,
    prompt_key,
    text_similarity,
)
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import without_question
from credit_trl.rollout.batch import GenerationBatch
from tiny import context_ids, length_verdicts

words = st.sampled_from("the cat dog sat ran on a mat fast".split())
texts = st.lists(st.lists(words, max_size=6).map(" ".join), min_size=1, max_size=8)


@given(texts)
def test_similarity_is_the_cosine_of_weighted_word_counts(texts):
    containing = Counter(word for text in texts for word in set(text.split()))
    weight = {word: 1 + math.log((1 + len(texts)) / (1 + count)) for word, count in containing.items()}
    for i, a in enumerate(texts):
        for j, b in enumerate(texts):
            x, y = ({w: n * weight[w] for w, n in Counter(t.split()).items()} for t in (a, b))
            norm = math.sqrt(sum(v * v for v in x.values()) * sum(v * v for v in y.values()))
            cosine = sum(x[w] * y.get(w, 0.0) for w in x) / norm if norm else 0.0
            assert text_similarity(texts)[i, j] == pytest.approx(cosine, abs=1e-9)


@given(texts, st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=50)
def test_nearest_prompts_are_drawn_in_order_of_similarity(texts, count, step):
    draws = draw_nearest(texts, texts, range(len(texts)), count, seed=0, step=step)
    distinct = list(dict.fromkeys(texts))
    similarity = text_similarity(distinct)
    for sample, draw in enumerate(draws):
        own = distinct.index(texts[sample])
        others = {text: similarity[own, i] for i, text in enumerate(distinct) if i != own}
        if not others:
            assert draw == []
            continue
        best = sorted(others.values(), reverse=True)
        assert [others[texts[i]] for i in draw] == pytest.approx([best[k % len(best)] for k in range(count)])
        assert len({texts[i] for i in draw}) == min(count, len(others))
    assert draws[-1:] == draw_nearest(texts, texts, [len(texts) - 1], count, seed=0, step=step)


def test_equally_near_prompts_are_drawn_at_random():
    texts = ["one", "two", "three", "four"]
    drawn = [draw_nearest(texts, texts, [0], 1, seed=0, step=step)[0][0] for step in range(60)]
    assert set(drawn) == {1, 2, 3}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), min_size=1, max_size=12), st.integers(1, 4))
def test_group_draws_stay_in_the_group_and_avoid_the_prompt(batch, count):
    keys, groups = [k for k, _ in batch], [g for _, g in batch]
    draws = draw_from_batch(keys, range(len(batch)), count, seed=3, step=1, groups=groups)
    for (key, group), draw in zip(batch, draws, strict=True):
        others = {k for k, g in batch if g == group} - {key}
        assert len(draw) == (count if others else 0)
        assert {groups[i] for i in draw} <= {group}
        assert len({keys[i] for i in draw} & others) == min(count, len(others))
    last = len(batch) - 1
    assert draw_from_batch(keys, [last], count, seed=3, step=1, groups=groups) == draws[-1:]


def test_source_none_keeps_the_system_message():
    assert without_question("What is 2+2?") == ""
    system = {"role": "system", "content": "Add."}
    dialogue = [system, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    asked = [*dialogue, {"role": "user", "content": "2+2?"}]
    assert without_question(asked) == [system, {"role": "user", "content": ""}]
    structured = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    assert without_question(structured) == [{"role": "user", "content": [{"type": "text", "text": ""}]}]
    assert prompt_key(asked) == prompt_key([*dialogue, {"role": "user", "content": "2+2?"}])  # nothing was changed


def test_completed_prompt_is_not_its_own_contrast(make_config):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Find {name}."}]} for name in "ab"])
    completed = [[{"role": "user", "content": row["prompt"][0]["content"] + " You see a door."}] for row in data]
    rollouts = GenerationBatch(list(data), completed, [[1], [1]], [0.0, 0.0], [None, None], first=0)
    config = make_config(contrastive_source="dataset")
    for step in range(20):
        assert draw_contrasts(rollouts, config, ContrastSource(data, step)) == [
            [data[1]["prompt"]],
            [data[0]["prompt"]],
        ]


@pytest.mark.parametrize("source", ["batch", "hard", "same_task"])
def test_rollouts_of_one_row_do_not_contrast_each_other(make_config, source):
    """An environment's `reset` may give each of them another first observation."""
    prompts = [f"Find {name}. You are in room {room}." for name in ("a door", "a key") for room in range(4)]
    rows = [{"task": "rooms"}] * 8
    rollouts = GenerationBatch(rows, prompts, [[1]] * 8, [0.0] * 8, [None] * 8, first=0, group_size=4)
    config = make_config(contrastive_source=source)
    for step in range(20):
        draws = draw_contrasts(rollouts, config, ContrastSource(None, step))
        assert all(prompt.split(".")[0] != other.split(".")[0] for prompt, [other] in zip(prompts, draws, strict=True))
        drawn = draw_privileged_contexts(
            rollouts, [PrivilegedContext(feedback=p) for p in prompts], 1, seed=0, step=step
        )
        assert all(p.split(".")[0] != z.feedback.split(".")[0] for p, [z] in zip(prompts, drawn, strict=True))


@pytest.fixture
def contexts_of(make_model, make_config, tokenizer):
    """Texts of the contexts of one generation batch, teacher first."""

    def build(rows, **options):
        dataset = Dataset.from_list(rows)
        config = make_config(per_device_train_batch_size=4 * len(rows), **options)
        trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
        trainer.model.train()
        seen = []
        trainer._score = lambda output, contexts: seen.extend(context_ids(c) for c in contexts) or {}
        trainer._generate_and_score_completions([row for row in dataset for _ in range(4)])
        return [[tokenizer.decode(ids) for ids in context] for context in seen]

    return build


def row(question, answer, **columns):
    return {"prompt": [{"role": "user", "content": question}], "answer": answer, **columns}


def test_source_none_keeps_z_and_needs_one_prompt_only(contexts_of):
    options = {"use_successful_as_teacher": False, "contrastive_source": "none"}
    for teacher, contrast in contexts_of([row("What is <2+2>?", "4")], **options):
        assert "What is <2+2>?" in teacher
        assert teacher.replace("What is <2+2>?", "") == contrast
        assert "The answer is 4." in contrast


def test_the_nearest_prompt_of_the_batch_is_the_contrast(contexts_of):
    rows = [
        row("sum of apples and pears", "1"),
        row("sum of apples and plums", "2"),
        row("name the capital city", "3"),
    ]
    contexts = contexts_of(rows, contrastive_source="hard")
    assert all("apples and plums" in contrast for _, contrast in contexts[:4])
    assert all("apples and pears" in contrast for _, contrast in contexts[4:8])


def test_contrasts_of_a_mixed_run_stay_within_the_task(contexts_of):
    rows = [row(f"question {task}{i}", "1", task=task) for task in "pq" for i in range(3)]
    contexts = contexts_of(rows, contrastive_source="same_task", contrastive_count=2)
    for sample, (_, *contrasts) in enumerate(contexts):
        own = rows[sample // 4]["prompt"][0]["content"]
        asked = {re.search(r"question ([pq]\d)", text)[0] for text in contrasts}
        assert len(asked) == 2
        assert own not in asked
        assert {text[-2] for text in asked} == {rows[sample // 4]["task"]}


def test_a_task_with_one_prompt_gets_no_contrast(contexts_of):
    rows = [row("alone", "1", task="p"), row("first", "1", task="q"), row("second", "1", task="q")]
    contexts = contexts_of(rows, contrastive_source="same_task")
    assert [len(context) for context in contexts] == [1] * 4 + [2] * 8


def test_same_task_needs_a_task_column(make_model, make_config, tokenizer, dataset):
    config = make_config(contrastive_source="same_task")
    with pytest.raises(ValueError, match=r"needs the column `task`.*`contrastive_source='batch'`"):
        CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)


@pytest.mark.parametrize("source", ["none", "hard"])
@pytest.mark.parametrize("baseline", ["mean_log", "log_mean"])
@pytest.mark.parametrize("support", ["teacher_topk", "student_topk", "full", "sampled"])
def test_every_source_and_baseline_trains_in_both_forms(
    make_model, make_config, tokenizer, dataset, source, baseline, support
):
    config = make_config(
        contrastive_source=source,
        contrastive_baseline=baseline,
        contrastive_count=1 if source == "none" else 2,
        contrastive_form="guide",
        contrastive_coef=1.5,
        contrastive_gate=0.01,
        distillation_support=support,
        max_steps=1,
    )
    trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
    trainer.train()
    (entry,) = (e for e in trainer.state.log_history if "loss" in e)
    assert np.isfinite(entry["grad_norm"])
    assert entry["grad_norm"] > 0
    assert entry["credit/frac_without_contrast"] == 0.0
