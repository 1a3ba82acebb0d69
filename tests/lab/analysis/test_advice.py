"""The advice, as a table of cases: facts and arms, in points, and what is advised."""

import pytest

from credit_trl.lab.analysis.advice import RULE, advise
from tables import tables_of

CASES = tables_of(__file__)


def change(pair):
    return None if pair is None else {"change": pair[0] / 100, "error": pair[1] / 100}


def arm_of(name, row, best):
    floor, gated, target = row
    form = "guide" if name.startswith("guide") else "subtract"
    return {
        "name": name,
        "form": form,
        "contrastive_coef": 0.1 if name == "λ = 0.1" else 0.0,
        "floor": change(floor),
        "gated": change(gated),
        "ceiling": change([target[0] - target[2], target[1]]) | {"mean": target[0] / 100},
        "above_best": change([target[0] - best, target[1]]),
    }


def advice_of(case):
    facts = {"mixed": {"mean": case["mixed"] / 100}, "best": {"mean": case["best"] / 100}}
    facts["read"] = change(case["read"])
    facts["conditions"] = {}
    for name, (mean, *pair) in case.get("wordings", {}).items():
        facts["conditions"][f"wording: {name}"] = {"mean": mean / 100} | change(pair)
    facts["parts"] = {name: change(pair) for name, pair in case.get("parts", {}).items()}
    arms = [arm_of(name, row, case["best"]) for name, row in case["arms"].items()]
    ahead = {name: [change(pair) for pair in pairs] for name, pairs in case.get("lookahead", {}).items()}
    return advise(facts, arms, ahead)


@pytest.mark.parametrize("name", CASES)
def test_advice_of(name):
    advice = advice_of(CASES[name])
    assert [advice.kind, *advice.arms] == CASES[name]["advised"]
    assert sorted(advice.dropped) == sorted(CASES[name].get("dropped", []))
    assert all(name in advice.sentence for name in [*advice.arms, *CASES[name].get("named", [])])


def test_rule_names_its_thresholds():
    for threshold in ("2 standard errors", "10%", "5%", "3. Where"):
        assert threshold in RULE
