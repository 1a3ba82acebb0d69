"""Scores, loss and gradients against a dense reference with all logits, in fp64 and by autograd."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from credit_trl.loss.credit_loss import CreditLoss, credit_loss
from credit_trl.loss.projection import top_columns
from credit_trl.loss.scores import SupportConfig, score_tokens
from dense_reference import (
    SUPPORTS,
    assert_same,
    assert_same_gradients,
    chunks_of,
    dense,
    dense_logps,
    loss_options,
    make_case,
    ours,
)

FORMS = ["subtract", "guide"]

shapes = st.fixed_dictionaries({"n": st.integers(1, 9), "v": st.integers(2, 70), "h": st.integers(1, 12)})
seeds = st.integers(0, 2**16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("support", "tail", "alpha"), SUPPORTS)
@given(
    shape=shapes,
    head=st.sampled_from([{}, {"bias": True}, {"softcap": 2.0}, {"bias": True, "softcap": 2.0}]),
    contrasts=st.sampled_from([0, 1, 3]),
    strength=st.sampled_from([1.0, 3.0]),
    seed=seeds,
    data=st.data(),
)
# Deterministic draws: two tokens that tie for the last place of a support would be a legitimate difference.
@settings(max_examples=12, derandomize=True)
def test_loss_and_every_gradient_equal_dense(form, support, tail, alpha, shape, head, contrasts, strength, seed, data):
    topk = data.draw(st.one_of(st.none(), st.integers(1, shape["v"])))
    problem = (support, tail, alpha, topk, data.draw(st.sampled_from([None, 2.0])))
    case = make_case(**shape, **head, contrasts=contrasts, seed=seed)
    if form == "guide":
        case.coef *= strength  # λ above 1
    exact = case.copy(torch.float64)
    result = ours(case, *problem, data.draw(st.integers(1, 10)), form=form)
    expected = dense(exact, *problem, form=form)
    result.loss.backward()
    expected.loss.backward()
    assert_same(result, expected, exact.weights)
    assert_same_gradients(case, exact, expected.ratio, tolerance=3e-5)


def test_error_of_a_small_bucket_is_the_rounding_of_fp32():
    """Nothing of it is left in fp64; in fp32 terms of size 1 cancel to a loss of 0.01."""
    case = make_case(n=3, v=15, h=3, bias=True, seed=307)
    exact = case.copy(torch.float64)
    problem = ("teacher_topk", "bucket", 1.0, 1)
    expected = dense(exact, *problem).token_loss
    assert_close(ours(exact, *problem).token_loss, expected, rtol=0, atol=1e-14)
    assert_close(ours(case, *problem).token_loss.double(), expected, rtol=0, atol=2**-20)


@pytest.mark.parametrize(("support", "tail", "alpha"), SUPPORTS)
def test_guide_without_contrast_is_bitwise_sdpo(support, tail, alpha):
    results = []
    for form in FORMS:
        case = make_case(contrasts=2, seed=3)
        case.coef.zero_()
        result = ours(case, support, tail, alpha, 5, form=form)
        result.loss.backward()
        results.append([result.loss, result.advantages, *(leaf.grad for leaf in case.leaves())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("support", "tail", "alpha"), SUPPORTS)
def test_what_is_logged_equals_the_dense_reference(form, support, tail, alpha):
    case = make_case(n=40, v=60, contrasts=3, bias=True, seed=1)
    result = ours(case, support, tail, alpha, 9, chunk_size=7, form=form)
    expected = dense(case.copy(torch.float64), support, tail, alpha, 9, form=form)
    names = {*CreditLoss._fields} - {"loss"}
    if tail == "renormalize" and support == "teacher_topk":
        assert result.student_mass.isnan().all()
        names -= {"student_mass", "entropy", "policy_logps"}
    for name in names:
        assert_close(getattr(result, name).double(), getattr(expected, name).detach(), rtol=2e-5, atol=2e-5, msg=name)


def test_importance_ratio_uses_true_logps():
    case = make_case(n=30, v=50, seed=3)
    result = ours(case, "teacher_topk", "renormalize", 1.0, 4, is_clip=1.5, chunk_size=8)
    exact = case.copy(torch.float64)
    logps = dense_logps(exact.hidden, exact.weight, None, exact).gather(-1, exact.token_ids[:, None])[:, 0].detach()
    assert_close(result.ratio.double(), (logps - exact.old_logps).exp().clamp(max=1.5), rtol=1e-5, atol=1e-5)
    assert 0 < (result.ratio == 1.5).sum() < 30
    # The normaliser was formed for it, so mass and entropy are the whole vocabulary's.
    expected = dense(exact, "teacher_topk", "renormalize", 1.0, 4)
    assert_close(result.student_mass.double(), expected.student_mass.detach(), rtol=1e-5, atol=1e-6)
    assert_close(result.entropy.double(), expected.entropy.detach(), rtol=1e-5, atol=1e-5)


def test_small_tail_keeps_its_digits():
    """Forward KL divides by the student's tail, of which 1 − Σp in fp32 has at most one correct digit here."""
    case = make_case(n=40, v=60, h=8, seed=8)
    case.hidden.data *= 5.0
    case.teacher = case.hidden.detach() * 0.8
    case.reference_weight = case.weight.detach().clone()
    exact = case.copy(torch.float64)
    logps = dense_logps(exact.hidden, exact.weight, None, exact)
    tail_mass = 1 - logps.topk(20).values.exp().sum(-1)
    is_small = (tail_mass > 1e-6) & (tail_mass < 1e-5)
    assert is_small.sum() >= 3
    for problem in (case, exact):
        problem.weights *= is_small
    ours(case, "teacher_topk", "bucket", 0.0, 20).loss.backward()
    dense(exact, "teacher_topk", "bucket", 0.0, 20).loss.backward()
    for leaf, exact_leaf in zip(case.leaves(), exact.leaves(), strict=True):
        assert (leaf.grad.double() - exact_leaf.grad).abs().max() <= 1e-4 * exact_leaf.grad.abs().max()


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize(("support", "tail"), [("teacher_topk", "bucket"), ("teacher_topk", "renormalize")])
def test_half_precision_inputs_are_accumulated_in_fp32(dtype, precision, support, tail):
    case = make_case(n=64, v=80, h=16, bias=True, softcap=4.0, seed=6, dtype=dtype)
    # λ, weights and the like are not stored in half precision.
    case.weights, case.coef, case.old_logps = case.weights.float(), case.coef.float(), case.old_logps.float()
    exact = case.copy(torch.float64)
    result = ours(case, support, tail, 0.5, 10, chunk_size=16)
    expected = dense(exact, support, tail, 0.5, 10)
    assert result.loss.dtype == result.token_loss.dtype == torch.float32
    assert_same(result, expected, exact.weights, tolerance=2e-5)
    result.loss.backward()
    expected.loss.backward()
    assert all(leaf.grad.dtype == dtype for leaf in case.leaves())
    # One rounding at the end, however many chunks were summed.
    assert_same_gradients(case, exact, expected.ratio, tolerance=precision)


@pytest.mark.parametrize(("support", "tail", "alpha"), SUPPORTS)
@pytest.mark.parametrize(("n", "contrasts"), [(0, 0), (0, 2), (6, 1)])
def test_no_token_or_weights_of_zero_give_a_zero_with_gradients(support, tail, alpha, n, contrasts):
    """Whatever the scores of these tokens."""
    case = make_case(n=n, v=20, contrasts=contrasts, bias=True, seed=7)
    case.weights.zero_()
    case.teacher[2:4] = torch.nan
    result = ours(case, support, tail, alpha, 5, chunk_size=4)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert all(leaf.grad.shape == leaf.shape and not leaf.grad.any() for leaf in case.leaves())
    assert result.token_logps.shape == result.ratio.shape == (n,)


@pytest.mark.parametrize(("retain", "message"), [(False, "a second time"), (True, "modified by an inplace operation")])
def test_second_backward_pass_raises(retain, message):
    loss = ours(make_case(), "teacher_topk", "bucket", 1.0, 5).loss
    loss.backward(retain_graph=retain)
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


class Allocations(TorchDispatchMode):
    """Records sizes of allocated storages, and the largest operand of each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.sizes: list[int] = []
        self.products: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments = [*args, *(kwargs or {}).values()]
        input_pointers = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        if "mm" in func.__name__:
            self.products += [x.numel() for x in args if isinstance(x, Tensor)]
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in input_pointers:
                self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize(("support", "tail", "alpha"), SUPPORTS)
def test_no_tensor_exceeds_one_chunk_or_the_head(support, tail, alpha):
    n, v, h, chunk = 256, 1000, 8, 16
    case = make_case(n=n, v=v, h=h, contrasts=4)
    with Allocations() as allocations:
        ours(case, support, tail, alpha, 5, 2.0, chunk).loss.backward()
    assert max(allocations.sizes) <= 2 * chunk * v < n * v / 4


def test_a_renormalised_support_touches_its_columns_only():
    n, v, h, k = 8, 5000, 16, 5
    case = make_case(n=n, v=v, h=h, contrasts=3, bias=True)
    support = SupportConfig("teacher_topk", k, "renormalize")
    head = case.head(case.reference_weight, case.reference_bias)
    with Allocations() as scoring:
        scores = score_tokens(case.teacher, case.contrasts, head, case.token_ids, support)
    with Allocations() as alone:
        score_tokens(case.teacher, case.contrasts[:0], head, case.token_ids, support)
    wide = [size for size in scoring.products if size > n * (k + 1) * h]
    assert wide == [size for size in alone.products if size > n * (k + 1) * h]
    with Allocations() as allocations:
        student = case.head(case.weight, case.bias)
        credit_loss(case.hidden, student, case.tokens(), scores, support, loss_options()).loss.backward()
    assert max(allocations.products) <= n * (k + 1) * h
    assert sum(size > n * (k + 1) * h for size in allocations.sizes) == 2  # the gradients of weight and bias
    touched = case.weight.grad.abs().sum(-1) > 0
    assert set(touched.nonzero()[:, 0].tolist()) <= set(scores.support_ids.flatten().tolist())


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_no_gradient_is_formed_where_none_is_wanted(tail):
    case = make_case(n=8, v=300, h=64)
    with torch.no_grad(), Allocations() as allocations:
        result = ours(case, "teacher_topk", tail, 1.0, 5)
    assert not result.loss.requires_grad
    assert max(allocations.sizes) < 300 * 64
    frozen = make_case(n=8, v=300, h=64)
    frozen.weight.requires_grad_(False)
    with Allocations() as allocations:
        ours(frozen, "teacher_topk", tail, 1.0, 5).loss.backward()
    ours(case, "teacher_topk", tail, 1.0, 5).loss.backward()
    assert max(allocations.sizes) < 300 * 64
    assert frozen.weight.grad is None
    assert torch.equal(frozen.hidden.grad, case.hidden.grad)


@given(n=st.integers(1, 5), v=st.integers(1, 3000), seed=st.integers(0, 2**16), ties=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_top_columns_are_torchs_topk(n, v, seed, ties, data):
    k = data.draw(st.integers(1, max(v - 1, 1)) | st.integers(1, max(v // 256, 1)))  # with groups, too
    logits = torch.randn(n, v, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if ties else logits
    ids = top_columns(logits, k)
    assert torch.equal(logits.gather(-1, ids), logits.topk(k, dim=-1).values)
    assert all(len(set(row)) == k for row in ids.tolist())
    assert top_columns(logits, v).tolist() == [list(range(v))] * n


@given(shape=shapes, contrasts=st.integers(0, 4), seed=st.integers(0, 2**16), data=st.data())
@settings(max_examples=30, derandomize=True, deadline=None)
def test_scores_are_the_dense_log_probabilities(shape, contrasts, seed, data):
    topk, chunk_size = data.draw(st.integers(1, shape["v"])), data.draw(st.integers(1, 10))
    case = make_case(**shape, contrasts=contrasts, bias=True, seed=seed, scale=1.7, temperature=0.6)
    exact = case.copy(torch.float64)
    head = case.head(case.reference_weight, case.reference_bias)
    f = dense_logps(exact.teacher, exact.reference_weight, exact.reference_bias, exact)
    g = [dense_logps(x, exact.reference_weight, exact.reference_bias, exact) for x in exact.contrasts]
    for tail in ("bucket", "renormalize"):
        with chunks_of(chunk_size):
            scores = score_tokens(
                case.teacher, case.contrasts, head, case.token_ids, SupportConfig("teacher_topk", topk, tail)
            )
        ids = scores.support_ids
        # The whole vocabulary keeps its order.
        assert_close(f.gather(-1, ids).sort(descending=True).values, f.topk(topk).values, rtol=1e-5, atol=1e-5)
        assert_close(scores.teacher_logps[:, :topk].double(), f.gather(-1, ids), rtol=1e-5, atol=1e-5)
        picked = [x.gather(-1, ids) for x in g]
        if tail == "renormalize" and topk < shape["v"]:
            picked = [x.log_softmax(-1) for x in picked]
        generic = torch.stack(picked).mean(0) if g else torch.zeros_like(f[:, :topk])
        assert_close(scores.generic_logps[:, :topk].double(), generic, rtol=1e-5, atol=1e-5)
        assert scores.teacher_logps.shape[-1] == topk + (tail == "bucket" and topk < shape["v"])


@pytest.fixture
def mesh():
    if dist.is_initialized():  # by an earlier test of this process
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_sharded_head_is_gathered_once(mesh, tail):
    plain, sharded = make_case(bias=True), make_case(bias=True)
    weight, bias = (
        distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_() for x in (sharded.weight, sharded.bias)
    )
    sharded.weight, sharded.bias = weight, bias
    sharded.reference_weight = distribute_tensor(sharded.reference_weight, mesh, [Shard(0)])
    sharded.reference_bias = distribute_tensor(sharded.reference_bias, mesh, [Shard(0)])
    results = []
    with CommDebugMode() as communication:
        for case in (plain, sharded):
            results.append(ours(case, "teacher_topk", tail, 1.0, 5, chunk_size=2))
    assert communication.get_total_counts() <= 4  # student and reference, weight and bias
    for result in results:
        result.loss.backward()
    assert torch.equal(results[0].loss, results[1].loss)
    assert torch.equal(plain.hidden.grad, sharded.hidden.grad)
    assert weight.grad.placements == weight.placements
    assert torch.equal(plain.weight.grad, weight.grad.full_tensor())
    assert torch.equal(plain.bias.grad, bias.grad.full_tensor())
