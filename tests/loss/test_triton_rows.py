"""The Triton kernels against the torch path and the dense reference: on a GPU, or in Triton's interpreter on a CPU.

`make test-slow` runs them in the interpreter, in an environment that has the package. With a GPU, plain pytest does.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from credit_trl.loss import head, projection
from credit_trl.loss.credit_loss import CreditLoss
from credit_trl.loss.head import BLANK, LMHead, choose_kernels
from dense_reference import Case, assert_same, assert_same_gradients, dense, make_case, ours

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernels = pytest.mark.skipif(
    not INSTALLED or not (INTERPRETED or DEVICE == "cuda"),
    reason="needs the package triton, and a GPU or TRITON_INTERPRET=1: `make test-slow` has an environment for it",
)
# Supports that differ in what the kernels do: ids taken out, top K sought, all logits kept, no vocabulary but a look.
PATHS = [
    ("teacher_topk", "bucket", 1.0),
    ("teacher_topk", "bucket", 0.0),
    ("teacher_topk", "renormalize", 0.5),
    ("sampled", "bucket", 1.0),
]

examples = settings(max_examples=15, derandomize=True, deadline=None)


class TritonCase(Case):
    """A test problem whose LM heads use the Triton kernels."""

    def head(self, weight: Tensor, bias: Tensor | None) -> LMHead:
        return replace(super().head(weight, bias), kernels="triton")


def moved(case: Case, kind: type[Case] = Case, device: str = "cpu") -> Case:
    """Copy of a problem on a device, with the gradients of its leaf tensors."""
    values = {f.name: getattr(case, f.name) for f in fields(Case)}
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = value.detach().to(device).requires_grad_(value.requires_grad)
            if value.grad is not None:
                values[name].grad = value.grad.to(device)
    return kind(**values)


def both(**options) -> list[Case]:
    """One problem on the device for each path, with separate leaf tensors."""
    return [moved(make_case(**options), kind, DEVICE) for kind in (Case, TritonCase)]


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """The kernels' module with small blocks, so that small rows have several blocks."""
    if not INSTALLED:
        return None
    from credit_trl.loss import triton_rows

    monkeypatch.setattr(triton_rows, "BLOCK", 16)
    return triton_rows


@pytest.fixture
def bf16_products(monkeypatch):
    """Emulate CUDA's products of bf16 tensors with fp32 sums and results on a CPU."""
    if DEVICE == "cuda":
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype_out", lambda a, b, dtype, *, out: out.copy_(a.float() @ b.float()), "CPU")
    library.impl("addmm.dtype_out", lambda c, a, b, dtype, *, out: out.copy_(c + a.float() @ b.float()), "CPU")
    for name in ("mm.dtype_out", "addmm.dtype_out"):
        library.impl(name, lambda *inputs, out: out, "Meta")
    for module in (head, projection):
        monkeypatch.setattr(module, "matmul_dtype", lambda hidden: hidden.dtype)
    yield
    library._destroy()


shapes = st.fixed_dictionaries({"n": st.integers(1, 4), "v": st.integers(2, 40), "h": st.integers(1, 8)})
heads = st.fixed_dictionaries(
    {
        "bias": st.booleans(),
        "softcap": st.sampled_from([None, 2.0, 30.0]),
        "scale": st.sampled_from([1.0, 0.4, 3.0]),
        "temperature": st.sampled_from([1.0, 0.6]),
    }
)


@kernels
@pytest.mark.parametrize(("support", "tail", "alpha"), PATHS)
@given(shape=shapes, options=heads, chunk_size=st.integers(1, 5), seed=st.integers(0, 2**16), data=st.data())
@examples
def test_loss_and_every_gradient_equal_the_dense_reference(
    support, tail, alpha, shape, options, chunk_size, seed, data
):
    topk, is_clip = data.draw(st.integers(1, shape["v"])), data.draw(st.sampled_from([None, 2.0]))
    problem = {**shape, **options, "contrasts": data.draw(st.sampled_from([0, 1, 3])), "seed": seed}
    _, case = both(**problem)
    exact = make_case(**problem).copy(torch.float64)
    result = ours(case, support, tail, alpha, topk, is_clip, chunk_size)
    expected = dense(exact, support, tail, alpha, topk, is_clip)
    result.loss.backward()
    expected.loss.backward()
    assert_same(result, expected, exact.weights)
    assert_same_gradients(moved(case), exact, expected.ratio)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("support", "tail", "alpha"), PATHS)
@given(shape=shapes, options=heads, chunk_size=st.integers(1, 5), seed=st.integers(0, 2**16), data=st.data())
@settings(max_examples=6, derandomize=True, deadline=None)
def test_values_and_gradients_equal_the_torch_path(
    support, tail, alpha, dtype, shape, options, chunk_size, seed, data
):
    topk = data.draw(st.integers(1, shape["v"]))
    plain, case = both(**shape, **options, contrasts=2, seed=seed, dtype=dtype)
    results = [ours(one, support, tail, alpha, topk, 2.0, chunk_size) for one in (plain, case)]
    for result in results:
        result.loss.backward()
    for name, a, b in zip(CreditLoss._fields, *results, strict=True):
        assert_close(b, a, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
    rounding = 2**-20 * (plain.weights.float() * results[0].ratio).sum() * options["scale"] / options["temperature"]
    for mine, theirs in zip(case.leaves(), plain.leaves(), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        assert (mine.grad - theirs.grad).abs().max() <= tolerance * theirs.grad.abs().max() + rounding


@kernels
def test_a_training_step_equals_the_torch_path(make_trainer, rows, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 512)
    launched = []
    gradients = rows.logit_gradients
    monkeypatch.setattr(rows, "logit_gradients", lambda *args: launched.append(1) or gradients(*args))
    logs, weights = [], []
    for name in ("torch", "triton"):
        trainer = make_trainer(max_steps=1, use_cpu=DEVICE == "cpu", distillation_kernels=name)
        assert trainer.args.contrastive_coef == 0.1
        trainer.train()
        assert bool(launched) == (name == "triton")
        logs.append(trainer.state.log_history[0])
        weights.append([p.detach().cpu() for p in trainer.model.parameters()])
    assert logs[0]["grad_norm"] > 0
    for key, value in logs[0].items():
        if key.startswith(("loss", "grad_norm", "entropy", "credit/")) and "seconds" not in key:
            assert logs[1][key] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), key
    for mine, theirs in zip(weights[1], weights[0], strict=True):
        assert_close(mine, theirs, rtol=0, atol=1e-4)  # Adam's first step: 1e-3 in the gradient's direction


@kernels
@given(
    n=st.integers(1, 3),
    v=st.integers(1, 50),
    size=st.sampled_from([1e-3, 1.0, 80.0, 1e4]),
    shift=st.sampled_from([0.0, -3e3, 3e3]),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
@settings(max_examples=25, derandomize=True, deadline=None)
def test_statistics_ignore_blanks(n, v, size, shift, seed, data):
    from credit_trl.loss.triton_rows import RowStatistics

    blank = data.draw(st.sets(st.integers(0, v - 1), max_size=v - 1))
    logits = torch.randn(n, v + 3, generator=torch.Generator().manual_seed(seed)) * size + shift
    logits = logits.to(DEVICE)[:, :v]  # rows lie further apart than they are wide
    left = logits[:, [i for i in range(v) if i not in blank]].double()
    logits[:, list(blank)] = BLANK
    kept = logits.clone()
    cut = data.draw(st.integers(0, v - 1))
    statistics = RowStatistics(True)
    for part in (logits[:, :cut], logits[:, cut:]) if cut else (logits,):
        statistics.fold(part)
    log_normalizer, entropy = statistics.result()
    assert torch.equal(logits, kept)
    p = left.softmax(-1)
    assert_close(log_normalizer.double(), left.logsumexp(-1), rtol=1e-6, atol=1e-5)
    # The entropy is a difference of numbers of the logits' size.
    assert_close(entropy.double(), torch.special.entr(p).sum(-1), rtol=1e-5, atol=1e-5 + 2e-6 * (size + abs(shift)))


def test_sorted_scatter_of_an_accelerator_equals_that_of_a_cpu(monkeypatch):
    """The operation that sorts has a CPU implementation too; a fake device type selects it."""
    generator = torch.Generator().manual_seed(0)
    ids, grads, hidden = torch.randint(7, (30, 5), generator=generator), torch.randn(30, 5), torch.randn(30, 4)
    for factors, shape in ((hidden, (9, 4)), (None, (9,))):
        expected, total = torch.ones(shape), torch.ones(shape)
        head.scatter_columns(ids, grads, factors, expected)
        with monkeypatch.context() as patched:
            patched.setattr(head, "_adds_in_order", lambda device: False)
            head.scatter_columns(ids, grads, factors, total)
        assert_close(total, expected)


COMPILE = (Path(__file__).parent / "cases" / "compile_kernels.txt").read_text()


@pytest.mark.skipif(not INSTALLED, reason="needs the package triton: `make test-slow` has an environment for it")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_compiled_kernels_read_and_write_each_entry_once(capability, tmp_path):
    """Triton compiles for a GPU without one; the PTX moves the bytes that docs/performance.md names.

    No kernel needs more than 40 registers a thread, so that a GPU's warps are not limited by them, or spills one.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILE, str(capability)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["registers"]) == 6
    assert max(found["registers"]) <= 40
    assert len(found["spills"]) == 12
    assert not any(found["spills"])
    entries = found["per_thread"]
    row, sums, of_row = 4 * entries, 3 * 4, 2 * 4
    assert found["plain"] == {"ld": row, "st": sums}
    assert found["scaled"] == found["softcap"] == {"ld": row, "st": row + sums}
    assert found["bias"] == {"ld": row + 2 * entries, "st": row + sums}
    assert found["bf16"] == {"ld": row + of_row, "st": 2 * entries}
    assert found["fp32"] == {"ld": row + of_row, "st": row}


def test_auto_takes_triton_on_a_gpu_where_it_is_installed(monkeypatch, recwarn):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("credit_trl.loss.head.find_spec", lambda name: object())
    assert [choose_kernels("auto", device) for device in (cpu, gpu)] == ["torch", "triton"]
    assert choose_kernels("torch", gpu) == "torch"
    assert not recwarn.list
    monkeypatch.setattr("credit_trl.loss.head.find_spec", lambda name: None)
    assert choose_kernels("auto", cpu) == "torch"
    with pytest.raises(ValueError, match=r"needs triton.*or set it to 'torch'"):
        choose_kernels("triton", cpu)
    with pytest.warns(UserWarning, match="triton is not installed"):
        assert choose_kernels("auto", gpu) == "torch"


@kernels
def test_fp64_stays_on_the_torch_path(monkeypatch, rows):
    monkeypatch.setattr(rows, "RowStatistics", None)
    monkeypatch.setattr(rows, "logit_gradients", None)
    plain, case = both(dtype=torch.float64)
    for one in (plain, case):
        ours(one, "teacher_topk", "bucket", 0.5, 5).loss.backward()
    for mine, theirs in zip(case.leaves(), plain.leaves(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
