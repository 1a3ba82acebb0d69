"""The probe of a trainer: facts against an independent computation, floors on an enumerated distribution, resuming."""

import json

import numpy as np
import pytest
from pandas import DataFrame, Series
from peft import LoraConfig

from credit_trl import Verdict
from credit_trl.lab.analysis import probing as module
from credit_trl.lab.analysis.probing import ProbeSettings, paired_change, probe, summarize_facts, weighted_change
from credit_trl.lab.analysis.targets import Arm
from credit_trl.tasks import Task
from tiny import length_verdicts

SETTINGS = ProbeSettings(prompts=4, arms=(Arm("SDPO", 0.0), Arm("guide 1.5", 1.5, "guide")))


def test_weighted_change_is_exact_on_an_enumerated_distribution():
    """Rollouts in the proportions of the policy, weighted by target over policy."""
    policy = np.array([0.5, 0.25, 0.125, 0.125])
    target = np.array([0.1, 0.2, 0.3, 0.4])
    right = np.array([True, False, True, False])
    answers = np.repeat(np.arange(4), [4, 2, 1, 1])
    successes = np.tile(right[answers], (6, 1))
    weights = np.tile((target / policy)[answers], (6, 1))
    floor = weighted_change(successes, weights)
    assert floor["change"] == pytest.approx(target[right].sum() - policy[right].sum())
    assert floor["error"] == pytest.approx(0.0, abs=1e-12)  # all prompts are alike
    assert floor["share"] == pytest.approx(1.0 / (target**2 / policy).sum())


def test_paired_change_has_the_error_of_the_mean_over_shared_prompts():
    values = Series([1.0, 0.0, 1.0, 1.0], index=[0, 1, 2, 3])
    baseline = Series([0.5, 0.0, 0.25, 1.0], index=[1, 0, 2, 7])
    differences = np.array([1.0 - 0.0, 0.0 - 0.5, 1.0 - 0.25])
    change = paired_change(values, baseline)
    assert change["change"] == pytest.approx(differences.mean())
    assert change["error"] == pytest.approx(differences.std(ddof=1) / np.sqrt(3))


def test_facts_are_means_over_prompts_of_what_was_answered():
    rng = np.random.default_rng(0)
    records = []
    for condition, count in [("without z", 3), ("own z of a wrong answer", 1), ("another prompt's z", 1)]:
        for prompt in range(8):
            for _ in range(count):
                reward = float(rng.integers(0, 2))
                record = {"prompt": prompt, "condition": condition, "success": reward == 1.0, "reward": reward}
                records.append(record | {"truncated": False, "part: form": reward, "part: length": -reward})
    facts = summarize_facts(DataFrame(records))

    def rates(condition):
        chosen = [[r["success"] for r in records if (r["prompt"], r["condition"]) == (i, condition)] for i in range(8)]
        return np.array([np.mean(group) for group in chosen])

    without = rates("without z")
    assert facts["success"]["mean"] == pytest.approx(without.mean())
    assert facts["mixed"]["mean"] == pytest.approx(((without > 0) & (without < 1)).mean())
    assert facts["best"]["mean"] == pytest.approx((without > 0).mean())
    assert facts["read"]["change"] == pytest.approx((rates("own z of a wrong answer") - without).mean())
    foreign = facts["conditions"]["another prompt's z"]
    assert foreign["change"] == pytest.approx((rates("another prompt's z") - without).mean())
    assert [*facts["parts"]] == ["form"]  # less of the other is better
    assert facts["parts"]["form"]["change"] == pytest.approx(facts["read"]["change"])


@pytest.fixture
def task(dataset):
    return Task.from_dataset(dataset, length_verdicts, "lengths")


def test_an_interrupted_probe_continues_with_the_same_result(make_trainer, task, tmp_path, monkeypatch):
    whole = probe(make_trainer(), task, SETTINGS, folder=tmp_path / "whole")
    weigh = module.importance_weights
    monkeypatch.setattr(module, "importance_weights", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe(make_trainer(), task, SETTINGS, folder=tmp_path / "part")
    monkeypatch.setattr(module, "importance_weights", weigh)
    monkeypatch.setattr(module.TrainerEngine, "sample", None)  # the rollouts are stored
    assert json.dumps(probe(make_trainer(), task, SETTINGS, folder=tmp_path / "part")) == json.dumps(whole)
    with pytest.raises(FileExistsError, match="a probe with other settings"):
        probe(make_trainer(), task, ProbeSettings(prompts=4), folder=tmp_path / "part")
    with pytest.raises(FileExistsError, match="a probe with other options"):
        probe(make_trainer(contrastive_coef=0.3), task, SETTINGS, folder=tmp_path / "part")


def test_a_new_adapter_changes_nothing_of_the_probe(make_trainer, task):
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    adapted, full = (probe(make_trainer(**options), task, SETTINGS) for options in ({"peft_config": lora}, {}))
    assert adapted["examples"] == full["examples"]
    assert adapted["facts"] == full["facts"]


def test_lookahead_trains_each_arm_and_grpo_on_two_seeds(make_trainer, task):
    trained = []

    def make(options):
        trained.append(options)
        return make_trainer(**options)

    settings = ProbeSettings(prompts=4, arms=(Arm("SDPO", 0.0),), lookahead=2)
    document = probe(make_trainer(), task, settings, make_trainer=make)
    assert [*document["lookahead"]] == ["GRPO", "SDPO"]
    assert [len(changes) for changes in document["lookahead"].values()] == [2, 2]
    assert {options["max_steps"] for options in trained} == {2}
    assert len({options["seed"] for options in trained}) == 2
    assert all(0.0 < change["share"] < 1.0 for changes in document["lookahead"].values() for change in changes)


def test_default_arms_and_number_of_prompts_follow_the_configuration(make_trainer, task, capsys):
    document = probe(make_trainer(contrastive_coef=0.2, contrastive_form="guide"), task)
    names = [arm["name"] for arm in document["arms"] if not arm["name"].startswith("λ_hold")]
    assert names == ["SDPO", "guide 0.2", "guide 1.5"]
    assert document["prompts"] == 8  # the least, since a step has eight rollouts only
    assert f"about {document['steps']:.0f} training steps" in capsys.readouterr().out


def test_unsupported_data_and_options_are_refused_by_name(make_trainer, dataset, task):
    with pytest.raises(ValueError, match="fewer than four rows"):
        probe(make_trainer(rows=dataset.take(3)), task)

    def on_turns(completions, **columns):
        return [Verdict(0.0, turn_feedback={0: "no"})] * len(completions)

    by_turn = Task("turns", None, None, on_turns)
    with pytest.raises(ValueError, match="turn_feedback"):
        probe(make_trainer(), by_turn, SETTINGS)
    silent = Task.from_dataset(dataset, lambda completions, **columns: [0.0] * len(completions))
    with pytest.raises(ValueError, match="no z to probe"):
        probe(make_trainer(), silent, SETTINGS)
