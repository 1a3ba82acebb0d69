"""Batches that are uneven between processes do not hang: all processes reach the same collectives in the same order.

Under FSDP2 and ZeRO, torch compares each collective between the processes (`TORCH_DISTRIBUTED_DEBUG=DETAIL`). The
tests compare the counts, and a watchdog ends processes that wait (`test_control_watchdog_ends_hanging_run`).
"""

import pytest

from distributed.launching import TYPES, assert_wrapped, finished, launch, needs, weights
from tables import tables_of

TABLES = tables_of(__file__)

RAGGED = TABLES["ragged"]
SUPPORTS = {"topk": {}, "whole": {"distillation_topk": None}, "sampled": {"distillation_support": "sampled"}}
CASES = [(wrapper, ragged, "topk") for wrapper in TYPES for ragged in RAGGED]
CASES += [("fsdp2", ragged, "whole") for ragged in RAGGED]
CASES += [("fsdp2", "a process without a teacher", "sampled"), ("zero3", "a process without a teacher", "whole")]
FAST = [CASES[0], ("fsdp2", "all truncated", "topk")]


def case(wrapper, ragged, support):
    marks = () if (wrapper, ragged, support) in FAST else pytest.mark.slow
    return pytest.param(wrapper, ragged, support, id=f"{wrapper}-{ragged}-{support}", marks=marks)


def assert_reached_together(facts: list[dict], wrapper: str, steps: int) -> None:
    assert_wrapped(facts, wrapper)
    assert [f["step"] for f in facts] == [steps] * 2
    assert facts[0]["collectives"] > 10 * steps


@pytest.mark.parametrize(("wrapper", "ragged", "support"), [case(*c) for c in CASES])
def test_all_processes_reach_all_collectives(tmp_path, wrapper, ragged, support):
    needs(wrapper)
    options = {"wrapper": wrapper, "max_steps": 2, **SUPPORTS[support], **RAGGED[ragged]}
    facts = finished(launch(tmp_path, 2, **options))
    assert_reached_together(facts, wrapper, steps=2)
    first_losses, second = ([abs(loss) for loss in f["losses"]] for f in facts)
    if ragged == "a process without a teacher":  # the batch is uneven as intended
        assert max(first_losses) > 0.0
        assert max(second) == 0.0
        assert facts[0]["log"][0]["credit/frac_without_teacher"] >= 0.5
    elif ragged == "completions of one token":
        assert {f["log"][0]["completions/max_length"] for f in facts[:1]} == {1.0}
    else:
        assert max(first_losses + second) == 0.0
        assert facts[0]["log"][0]["completions/clipped_ratio"] == 1.0


@pytest.mark.parametrize(
    "wrapper", ["fsdp2", *(pytest.param(w, marks=pytest.mark.slow) for w in ("ddp", "zero2", "zero3"))]
)
def test_generation_with_uneven_lengths_does_not_hang(tmp_path, wrapper):
    """With sharded weights, each generated token needs collectives."""
    needs(wrapper)
    endings = {"completions": "sampled", "generation_kwargs": {"eos_token_id": list(range(0, 256, 2))}}
    facts = finished(launch(tmp_path, 2, wrapper=wrapper, max_steps=4, max_completion_length=40, **endings))
    assert_reached_together(facts, wrapper, steps=4)
    assert facts[0]["longest"] != facts[1]["longest"]


def test_unread_feedback_of_any_process_raises_warning(tmp_path):
    options = {"verdicts": "feedback on the second process", "include_environment_feedback": False, "max_steps": 1}
    first_facts, second = finished(launch(tmp_path, 2, wrapper="ddp", **options))
    assert {"feedback_off", "lost_turns"} <= set(first_facts["alarms"])  # only the main process warns
    assert second["alarms"] == []


@pytest.mark.slow
def test_control_watchdog_ends_hanging_run(tmp_path):
    ended = launch(tmp_path, 2, limit=20.0, wrapper="ddp", unequal=True)
    assert ended.hung or any(ended.codes), ended.codes
    assert ended.facts == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES["unpadded"])
def test_processes_without_padding_equal_processes_with_it(tmp_path, name):
    """Ranks with completions of other lengths, accumulated over four micro-batches, half without a teacher."""
    wrapper, options = TABLES["unpadded"][name]
    needs(wrapper)
    steps = 3 if name == "fsdp2-packed" else 8
    common = {"wrapper": wrapper, "optim": "sgd", "learning_rate": 0.02, "max_steps": steps, "batch": 4}
    common |= {"gradient_accumulation_steps": 4, "verdicts": "first process only"}
    common_options = {name: value for name, value in options.items() if name != "packed"}
    padded = finished(launch(tmp_path / "padded", 2, padded=True, **common, **common_options))
    facts = finished(launch(tmp_path / "unpadded", 2, **common, **options))
    assert facts[0]["collectives"] == facts[1]["collectives"]
    for ours, theirs in zip(facts[0]["log"], padded[0]["log"], strict=True):
        assert (ours["loss"], ours["grad_norm"]) == pytest.approx((theirs["loss"], theirs["grad_norm"]), abs=1e-6)
    unpadded, expected = (weights(tmp_path / folder)["weights"] for folder in ("unpadded", "padded"))
    assert max((unpadded[n] - expected[n]).abs().max() for n in expected) <= 1e-6
    factors = [row["credit/padding_factor"] for row in facts[0]["log"]]
    assert max(factors) <= 1.0 if "packed" in options else min(factors) >= 1.0  # prompts are read once
