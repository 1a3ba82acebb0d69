"""Several gloo processes on CPU match one: draws, losses, metrics, and weights of policy, teacher and engine.

A stand-in engine keeps the weights it gets; `tests/vllm_engine` tests a real engine with one process.
"""

from math import nan

import pytest
import torch

import rounding
from distributed.launching import TYPES, assert_wrapped, finished, launch, losses, needs, weights
from tiny import save_model

# SGD, so that weights also reveal a wrong scale of the gradient.
COMMON = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
WHOLE = {"distillation_topk": None}
LORA = {"lora": True}
LIVE = {"teacher_model_kind": "live"}
# The policy has more rows of embeddings, so that the teacher's are padded.
MODEL = {"teacher_model_kind": "model", "teacher_update_rate": 0.01, "max_steps": 2, "vocab_size": 264}
PLAIN = {**MODEL, "teacher_prompt": "student", "contrastive_coef": 0.0, "contrastive_count": 1}
QUANTIZED = {"teacher_model_init_kwargs": rounding.OPTIONS, **PLAIN}
FAST = [("ddp", 2, {}), ("ddp", 2, LORA | WHOLE), ("fsdp2", 2, {})]
SLOW = [
    *((wrapper, 2, {"engine": True, **options}) for wrapper in TYPES for options in ({}, LORA)),
    *((wrapper, 2, PLAIN) for wrapper in TYPES),
    *(("fsdp2", 2, options) for options in (WHOLE, LIVE, MODEL, WHOLE | PLAIN, QUANTIZED)),
    *(("zero3", 2, options) for options in (WHOLE, LIVE, MODEL, WHOLE | PLAIN, {"distillation_weight": 0.5})),
    *(("zero3", 2, {"from_path": True, **options}) for options in ({}, LORA)),
    # Four processes of two rollouts, so that each group spans two processes.
    *(("ddp", 4, {"batch": 8, **options}) for options in (WHOLE, LORA)),
    *((wrapper, 4, {"batch": 8}) for wrapper in ("fsdp2", "zero2")),
    ("zero3", 4, {"batch": 8, **LORA}),
]
METRICS = ("credit/teacher_drift", "credit/kl_to_target", "credit/frac_without_teacher", "grad_norm", "loss")
LOCAL = ("padding_factor", "seconds")  # they depend on the processes
LARGEST = 259 * 32  # elements of the tiny model's largest parameter, its embedding


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("teacher"), seed=5, hidden_size=48)


def share_of_the_teacher(wrapper, processes, options):
    """A live teacher holds nothing; under ZeRO an adapter's average and quantized weights are whole."""
    if options.get("teacher_model_kind") == "live":
        return 0.0
    is_whole = wrapper in ("ddp", "zero2") or (wrapper == "zero3" and "lora" in options)
    return 1.0 if is_whole or "teacher_model_init_kwargs" in options else 1 / processes


@pytest.mark.parametrize(
    ("wrapper", "processes", "options"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_processes_match_single_process(tmp_path, one_process, teacher, wrapper, processes, options):
    needs(wrapper)
    kind = options.get("teacher_model_kind", "ema")
    options = COMMON | options | ({"teacher_model_name_or_path": teacher} if kind == "model" else {})
    folder, alone = one_process(**options)
    facts = finished(launch(tmp_path, processes, wrapper=wrapper, **options))
    assert_wrapped(facts, wrapper)
    share = share_of_the_teacher(wrapper, processes, options)
    assert [f["teacher_held"] for f in facts] == pytest.approx([share] * processes, rel=0.1)
    if wrapper == "zero3" and kind == "ema":  # the average is gathered one parameter at a time
        copies = 1 if "lora" in options else 2  # the parameter of the student and that of the EMA
        assert 0 < max(f["gathered"] for f in facts) <= copies * LARGEST < copies * facts[0]["parameters"] / 3

    draws, expected = (sorted((d[1], d[0]) for f in run for d in f["draws"]) for run in (facts, [alone]))
    assert draws == expected
    assert draws or options.get("contrastive_coef") == 0.0
    assert [f["synchronised"] for f in facts] == [options["max_steps"] if "engine" in options else 0] * processes
    torch.testing.assert_close(losses(facts), losses([alone]), rtol=1e-4, atol=1e-5)
    expected = weights(folder)
    for rank in range(processes):
        process_weights = weights(tmp_path, rank)
        for part in ("weights", "teacher", "engine"):
            assert process_weights[part].keys() == expected[part].keys()
            for key, value in expected[part].items():
                torch.testing.assert_close(
                    process_weights[part][key], value, rtol=1e-4, atol=2e-5, msg=f"{part} {key}"
                )
                assert part == "weights" or kind != "model" or torch.equal(process_weights[part][key], value)
    for ours, theirs in zip(facts[0]["log"], alone["log"], strict=True):
        for name in METRICS if wrapper.startswith("zero") else theirs:
            if name in METRICS or (name.startswith("credit/") and not any(word in name for word in LOCAL)):
                assert ours.get(name, nan) == pytest.approx(theirs.get(name, nan), 1e-3, 1e-5, nan_ok=True), name


def test_control_weights_move_beyond_tolerance(one_process):
    """The weights change by more than the tolerance, and the teacher follows; some samples have no teacher."""
    folder, facts = one_process(**COMMON)
    state = weights(folder)
    moved = {name: (value - state["teacher"][name]).abs().max() for name, value in state["weights"].items()}
    assert moved["lm_head.weight"] > 1e-3
    assert min(moved.values()) > 2e-5
    assert facts["log"][-1]["credit/teacher_drift"] > 0
    assert any(entry["credit/frac_without_teacher"] > 0 for entry in facts["log"])


@pytest.mark.slow
def test_zero3_refuses_a_quantized_teacher(tmp_path, teacher):
    needs("zero3")
    ended = launch(tmp_path, 2, wrapper="zero3", teacher_model_name_or_path=teacher, **COMMON | QUANTIZED)
    assert ended.codes == [1, 1]
    assert "Use FSDP2 or ZeRO-2, or a teacher without a `quantization_config`" in ended.output
