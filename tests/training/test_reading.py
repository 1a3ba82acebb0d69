"""The share of samples whose teacher prefers the answer that a verdict names."""

from __future__ import annotations

import pytest
import torch

from credit_trl import CreditTrainer, Verdict
from credit_trl.tasks import quickstart, sciknoweval
from credit_trl.training.reading import first_difference


def swapped(completions, answer, **kwargs):
    """A verdict that names the completion with its second byte changed to "z"."""
    texts = [c[-1]["content"] for c in completions]
    return [Verdict(0.0, f"It is {a}.", corrected=t[:1] + "z" + t[2:]) for t, a in zip(texts, answer, strict=True)]


@pytest.mark.parametrize(("topk", "tail"), [(4, "bucket"), (300, "bucket"), (40, "renormalize")])
def test_share_is_that_of_a_plain_forward_pass(make_model, make_config, tokenizer, dataset, topk, tail):
    topk = min(topk, len(tokenizer) - 1)
    config = make_config(distillation_topk=topk, distillation_tail=tail, max_steps=1, contrastive_coef=0.0)
    trainer = CreditTrainer(make_model(), swapped, config, dataset, processing_class=tokenizer)
    kept = {}
    build, score = trainer._build_contexts, trainer._score
    trainer._build_contexts = lambda batch: kept.setdefault("contexts", build(kept.setdefault("batch", batch)))
    trainer._score = lambda output, contexts: score(kept.setdefault("output", dict(output)), contexts)
    trainer.train()
    reference, preferred, counted = make_model().eval(), 0, 0
    for context, ids, corrected in zip(
        kept["contexts"], kept["batch"].completion_ids, kept["batch"].corrected, strict=True
    ):
        found = first_difference(ids, corrected, tokenizer)
        if found is None:
            continue
        position, token = found
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([context.teacher + list(ids[:position])])).logits[0, -1]
        kept_ids = logits.topk(topk).indices
        if tail == "renormalize" and ids[position] not in kept_ids:
            continue
        is_kept = token in kept_ids
        preferred, counted = preferred + bool(is_kept and logits[token] > logits[ids[position]]), counted + 1
    logged = trainer.state.log_history[0]
    assert logged["credit/named_answers"] == counted > 0
    assert logged["credit/teacher_prefers_answer"] == pytest.approx(preferred / counted)


def test_first_difference_needs_the_same_text_before(tokenizer):
    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    assert first_difference([*encode("It is A."), tokenizer.eos_token_id], "It is B.", tokenizer) == (6, *encode("B"))
    assert first_difference(encode("It is A."), "It is A.", tokenizer) is None
    assert first_difference(encode("It"), "It is A.", tokenizer) is None


def test_tasks_name_the_corrected_completion():
    answer = quickstart.build("train")[0]["answer"]
    wrong = 'Thought: rain is about weather.\nAction: weather_api\nAction Input: {"city": "Oslo"}'
    named = quickstart.verify(wrong, {"option": "A", "tool": "food_api", "city": "Oslo"}).corrected
    assert named == wrong.replace("weather", "food")
    assert quickstart.verify(named, {"option": "A", "tool": "food_api", "city": "Oslo"}) == Verdict(
        1.0, "Correct option: A.", {"format": 1.0, "shortcut": 0.0}
    )
    assert quickstart.verify("no format", answer).corrected is None
    assert sciknoweval.verify("So <answer>B</answer>", "C").corrected == "So <answer>C</answer>"
    assert sciknoweval.verify("So <answer>C</answer>", "C").corrected is None
    assert sciknoweval.verify("So C", "C").corrected is None
