"""Study with SmolLM2: arms, resumption, rows, general damage, real requests."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from credit_trl import CreditConfig
from credit_trl.cli.quickstart_tasks import quickstart_task


@pytest.fixture(scope="module")
def study(example):
    return example("study")


@pytest.fixture(scope="module")
def unrelated(example):
    return example("unrelated")


@pytest.mark.parametrize("setting", ["average", "frozen", "default"])
def test_every_arm_is_a_valid_configuration(study, tmp_path, setting):
    setting = study.SETTINGS[setting].options
    defaults = {**quickstart_task("smollm2").defaults, "bf16": False}
    configs = {
        arm: CreditConfig(
            str(tmp_path), **{**defaults, **setting, **{k: v for k, v in options.items() if k != "task"}}
        )
        for arm, options in study.ARMS.items()
    }
    assert configs["sdpo"].contrastive_coef == 0.0
    assert configs["grpo"].distillation_weight == 0.0
    assert configs["temper-only"].contrastive_swap == "self"
    assert "Previous assessment" in configs["sdpo-paper"].feedback_template


@pytest.fixture(autouse=True)
def _fast_bf16(study, monkeypatch):
    monkeypatch.setattr(study, "has_fast_bf16", lambda device: True)


def arguments(study, tmp_path, **options):
    defaults = {
        "setting": "average",
        "arms": ["sdpo", "grpo"],
        "seeds": [10, 11],
        "hours": 1.0,
        "steps": 1,
        "real": None,
        "gpu": False,
    }
    files = {"results": tmp_path / "results" / "runs.csv", "output_dir": tmp_path}
    return argparse.Namespace(**{**defaults, **files, **options})


def test_interrupted_study_repeats_no_run(study, tmp_path, monkeypatch):
    started = []

    def run(arm, seed, *rest):
        if len(started) == 3:
            raise KeyboardInterrupt
        started.append((arm, seed))
        return {"arm": arm, "seed": seed, "accuracy_before": 0.3, "accuracy_after": 0.3 + seed / 100}

    monkeypatch.setattr(study, "run_arm", run)
    args = arguments(study, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        study.run_missing(args)
    monkeypatch.setattr(
        study, "run_arm", lambda arm, seed, *rest: started.append((arm, seed)) or {"arm": arm, "seed": seed, "kl": 0.1}
    )
    study.run_missing(args)
    assert started == [("sdpo", 10), ("grpo", 10), ("sdpo", 11), ("grpo", 11)]
    rows = study.read_rows(args.results)
    assert [row["kl"] for row in rows] == ["", "", "", "0.1"]


def test_rows_of_one_setting_do_not_stand_for_another(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "run_arm", lambda arm, seed, *rest: {"arm": arm, "seed": seed})
    for setting in ("default", "average"):
        study.run_missing(arguments(study, tmp_path, setting=setting, arms=["sdpo"], seeds=[10]))
    assert [row["setting"] for row in study.read_rows(tmp_path / "results" / "runs.csv")] == ["default", "average"]


def test_rows_in_fp32_have_a_setting_of_their_own(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "has_fast_bf16", lambda device: device == "cuda")
    monkeypatch.setattr(study, "run_arm", lambda arm, seed, *rest: {"arm": arm, "seed": seed})
    for gpu in (False, True):
        study.run_missing(arguments(study, tmp_path, arms=["sdpo"], seeds=[10], gpu=gpu))
    assert [row["setting"] for row in study.read_rows(tmp_path / "results" / "runs.csv")] == [
        "average-fp32",
        "average",
    ]


def test_no_run_starts_that_would_end_too_late(study, tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 1500))
    monkeypatch.setattr(study.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(study, "run_arm", lambda arm, seed, *rest: {"arm": arm, "seed": seed})
    args = arguments(study, tmp_path)
    study.run_missing(args)
    assert len(study.read_rows(args.results)) == 1


def summary_rows(arm, scores):
    return [
        {"setting": "default", "arm": arm, "seed": str(seed), "accuracy_before": "0.3", "accuracy_after": str(score)}
        | {"opening_after": "0.1", "kl": "0.5"}
        for seed, score in enumerate(scores)
    ]


def student_interval(values):
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return f"{np.mean(values):.3f} [{low:.3f}, {high:.3f}]"


def test_summary_has_means_and_student_intervals_over_seeds(study):
    after = (0.5, 0.7, 0.9)
    line = study.summary(summary_rows("sdpo", after)).splitlines()[2]
    assert line.startswith("| default | sdpo | 3 | 0.400 [")
    assert f"| {student_interval(after)} |" in line


@pytest.mark.parametrize("gpu", [False, True])
def test_study_trains_and_measures_on_the_device_of_its_option(study, tmp_path, monkeypatch, gpu):
    used = {}
    result = argparse.Namespace(steps=1)
    monkeypatch.setattr(study, "run_quickstart", lambda *args, **options: used.update(options) or result)
    monkeypatch.setattr(study, "measures", lambda result: {})
    monkeypatch.setattr(study, "damage_and_real", lambda task, trained, real, device: {"device": device})
    row = study.run_arm("sdpo", 10, arguments(study, tmp_path, gpu=gpu))
    assert (used["use_cpu"], row["device"]) == (not gpu, "cuda" if gpu else "cpu")


def test_summary_pairs_differences_from_sdpo_by_seed(study):
    rows = [*summary_rows("sdpo", (0.5, 0.7, 0.9)), *reversed(summary_rows("guide", (0.6, 0.75, 0.95, 0.1)))]
    header, _, sdpo, guide = study.summary(rows).splitlines()
    column = header.split(" | ").index("accuracy_after − SDPO")
    assert guide.split(" | ")[column] == student_interval((0.1, 0.05, 0.05))
    assert not sdpo.split(" | ")[column].strip()


def test_row_has_the_evaluations_between_first_and_last_step(study, tmp_path):
    lines = [{"step": step, "score": step / 100, "metrics": {"opening": step / 50}} for step in (0, 20, 40)]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert study.measures_during(tmp_path, 40) == {"accuracy_step20": 0.2, "opening_step20": 0.4}


@pytest.fixture
def first_tokens(example):
    """First tokens of five prompts over a vocabulary of 40, of which ids 3, 7 and 20 begin openings."""
    logps = torch.randn(6, 5, 40, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)
    return example("frames").FirstToken(logps[0], logps[1], logps[2:], torch.tensor([5] * 5), [3, 7, 20])


@pytest.mark.parametrize("coef", [0.1, 0.5])
@pytest.mark.parametrize("form", ["subtract", "guide"])
def test_predicted_frame_rate_is_that_of_the_softmax_of_r_plus_log_p(example, first_tokens, coef, form):
    first = first_tokens
    frames = example("frames")
    support = frames.Support.of(first, topk=39)  # and one token as the rest
    options = {"contrastive_coef": coef, "contrastive_form": form}
    targets = frames.arm_targets(first, support, options)
    f = first.teacher.double()
    for found, g in zip(targets, first.contrasts.double(), strict=True):
        target = (f.exp() / g.exp() ** coef) if form == "subtract" else f.exp() ** (1 + coef) / g.exp() ** coef
        opening = target[:, first.openings].sum(-1)
        close = {"atol": 1e-5, "rtol": 1e-4}
        torch.testing.assert_close(support.openings(found).double(), opening / target.sum(-1), **close)
        torch.testing.assert_close(support.log_odds(found).double(), (opening / target[:, 5]).log(), **close)


def test_predicted_frame_rate_of_sdpo_is_the_teachers(example, first_tokens):
    first = first_tokens
    frames = example("frames")
    support = frames.Support.of(first, topk=39)
    (target,) = frames.arm_targets(first, support, {"contrastive_coef": 0.0, "contrastive_swap": "self"})
    torch.testing.assert_close(support.openings(target), first.teacher[:, first.openings].exp().sum(-1))


def test_prompts_whose_right_call_is_outside_the_support_have_no_branch(example, first_tokens):
    first = first_tokens
    support = example("frames").Support.of(first, topk=4)
    odds = support.log_odds(support.buckets(first.teacher))
    likeliest = [set(row.tolist()) for row in first.teacher.topk(4).indices]
    assert odds.isfinite().tolist() == [5 in own and bool(own & set(first.openings)) for own in likeliest]


def test_openings_are_first_tokens_before_a_call(example, tokenizer):
    frames = example("frames")
    opened, own = "The tool is B. hotels(Oslo)", "hotels(Oslo)"
    (first,) = frames.opening_tokens(tokenizer, [own, opened, opened])
    assert opened.startswith(tokenizer.decode([first]))
    assert frames.opening_tokens(tokenizer, [own]) == []


def test_report_states_delta_s_and_the_critical_lambda(example):
    frames = example("frames")

    def logps(opening):
        return torch.tensor([opening, 1 - opening, *[1e-9] * 28]).log().repeat(4, 1)

    report = frames.report(frames.FirstToken(logps(0.1), logps(0.5), logps(0.9)[None], torch.ones(4, dtype=int), [0]))
    assert "δ, nats: median 2.20" in report
    assert "s, nats: median 2.20" in report
    assert "λ_c there: median 0.50" in report
    assert "| sdpo | 50.0 | +2.20 | |" in report
    assert "| credit-0.5 | 25.0 | +1.10 |" in report  # log-odds 0 / 2 - 2.2 / 2, from -2.2
    assert "| credit-0.2 | 39.2 | +1.76 | +6.59 |" in report  # 2.2 * 0.8 / 0.2 - 2.2 at the fixed point
    assert "| temper-only | 50.0 | +2.20 | |" in report


def test_two_alike_openings_raise_the_critical_lambda(example):
    frames = example("frames")

    def logps(*openings):
        return torch.tensor([*openings, 1 - sum(openings), *[1e-9] * 28]).log().repeat(4, 1)

    def critical(student, teacher, contrast):
        count = len(student)
        parts = logps(*student), logps(*teacher), logps(*contrast)[None]
        first = frames.FirstToken(*parts, torch.full((4,), count), list(range(count)))
        return frames.critical_coef(first, frames.Support.of(first))

    nats = math.log(9)  # δ = s of an opening with 0.1, 0.5 and 0.9, and of each of two with half of the odds
    assert critical([0.1], [0.5], [0.9]) == pytest.approx([0.5] * 4, abs=0.011)
    both = critical([0.05] * 2, [0.25] * 2, [0.45] * 2)
    assert both == pytest.approx([nats / (2 * nats - math.log(2))] * 4, abs=0.011)
    assert critical([0.1], [0.5], [0.5]) == [math.inf] * 4


def test_first_tokens_are_those_of_the_prompt_with_feedback(example, make_model, tokenizer):
    frames = example("frames")
    model = make_model().eval()
    prompt = [{"role": "user", "content": "hi"}]
    found = frames.first_logps(model, tokenizer, [prompt, [{"role": "user", "content": "a longer prompt"}]])
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        own = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(found[0], own, atol=0.05, rtol=0.05)


def test_unrelated_prompts_are_two_hundred(unrelated):
    assert len(set(unrelated.PROMPTS)) == 200


def test_damage_is_zero_for_the_base_and_the_kl_of_another_model(unrelated, make_model, tokenizer):
    base, other = make_model().eval(), make_model().eval()
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.5)
    pairs = unrelated.answer_prompts(base, tokenizer, unrelated.PROMPTS[:3], tokens=5, batch_size=2)
    same = unrelated.measure_damage(base, base, pairs)
    assert same.kl == pytest.approx(0.0, abs=1e-6)
    assert same.perplexity == pytest.approx(same.base_perplexity)
    found = unrelated.measure_damage(base, other, pairs, batch_size=2)
    kl, nll = [], []
    for prompt, answer in pairs:
        assert len(answer) <= 5
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            own, new = (model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in (base, other))
        kl += F.kl_div(new, own, log_target=True, reduction="none").sum(-1).tolist()
        nll += (-new[torch.arange(len(answer)), torch.tensor(answer)]).tolist()
    assert found.kl == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert found.perplexity == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-3)


def test_real_requests_have_four_functions_and_the_golden_one(example, tmp_path):
    names = ["getRate", "getHistory", "listCodes", "convert", "status"]
    documentation = "".join(f'{name}: Does it.\nParameters: {{"a": "string"}}\nOutput: x\n' for name in names)
    records = [
        {
            "prompt": f"Tools:\n{documentation}\nBegin!\nQuestion: What is the rate?",
            "answer": json.dumps([{"Action": a}]),
        }
        for a in ("getRate", "unknown")
    ]
    several = {**records[0], "answer": json.dumps([{"Action": "getRate"}] * 2)}
    path = tmp_path / "real.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (*records, several)))
    real = example("real_requests")
    (row,) = real.build("test", path).to_list()
    assert row["prompt"][1]["content"] == "What is the rate?"
    assert row["answer"] == "getRate"
    assert "getRate" in row["prompt"][0]["content"]
    assert [real.verify(text, "getRate").reward for text in ("getRate(x)", "convert(1)", "none")] == [1.0, 0.0, 0.0]
