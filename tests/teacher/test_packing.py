"""The attention of packed rows against dense attention of each sequence, and the masks that it forms."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from credit_trl.teacher import packing
from credit_trl.teacher.packing import RowLayout, packed_sdpa

# A prefix of three sequences, one of which continues by a single token, and a sequence of its own.
LENGTHS, PARENTS = [12, 5, 14, 1, 30], [None, 0, 0, 0, None]
SHARED = 26  # tokens of the longest sequence that shares the prefix
WINDOWS = [None, SHARED, 9, 1]
HEADS = [(4, 4), (4, 2), (3, 1)]


def dense(query, key, value, window):
    """Attention of one sequence, or of its last tokens, from every pair of its tokens, in fp64."""
    query, key, value = (x.double() for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    places = torch.arange(key.shape[2], device=key.device)
    distance = places[-query.shape[2] :, None] - places
    is_seen = (distance >= 0) & (distance < (window or key.shape[2]))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~is_seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def naive_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch's kernel computes: the last query of each sequence sees its last key and those before it."""
    bounds = [pairwise(cu.tolist()) for cu in (cu_seq_q, cu_seq_k)]
    outputs = []
    for (start, end), (key_start, key_end) in zip(*bounds, strict=True):
        states = [query[start:end], key[key_start:key_end], value[key_start:key_end]]
        outputs.append(dense(*(x.transpose(0, 1)[None] for x in states), window_size[0] + 1)[0].float())
    assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
    assert (scale, enable_gqa) == (0.3, True)
    return torch.cat(outputs)


def make_states(heads, width, dtype=torch.float32, device="cpu"):
    """Query, key and value of a row."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, count, sum(LENGTHS), width) for count in (heads[0], heads[1], heads[1]))
    states = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    return SimpleNamespace(is_causal=True, num_key_value_groups=heads[0] // heads[1], training=False), states


def assert_that_of_the_sequences(actual, states, window, atol):
    """The output of attention and its gradients are those of dense attention over each sequence."""
    pieces = torch.arange(sum(LENGTHS)).split(LENGTHS)
    expected = []
    for piece, parent in zip(pieces, PARENTS, strict=True):
        columns = piece if parent is None else torch.cat([pieces[parent], piece])
        expected.append(dense(*(x[:, :, columns] for x in states), window)[:, -len(piece) :])
    expected = torch.cat(expected, dim=1)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).to(actual.device)
    gradients = (torch.autograd.grad((of * weights).sum(), states) for of in (actual, expected))
    for piece, expected_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(piece, expected_gradient, rtol=10 * atol, atol=10 * atol)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_that_of_the_sequences_with_small_masks(monkeypatch, heads, window):
    """On a CPU a short piece after a prefix reads its own queries only; on a GPU see `test_imagined_gpu.py`."""
    attend = nn.functional.scaled_dot_product_attention
    masks = []

    def counted(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    module, states = make_states(heads, 8)
    actual, _ = packed_sdpa(module, *states, None, RowLayout(LENGTHS, PARENTS), sliding_window=window, scaling=0.3)
    assert_that_of_the_sequences(actual, states, window, 1e-6)
    assert len(masks) == len(LENGTHS)
    full_lengths = [
        length_of_piece if parent is None else LENGTHS[parent] + length_of_piece
        for length_of_piece, parent in zip(LENGTHS, PARENTS, strict=True)
    ]
    for mask, length_of_piece, length in zip(masks, LENGTHS, full_lengths, strict=True):
        is_masked = 2 * length_of_piece < length or (window is not None and length > window)
        assert (None if mask is None else mask.shape[2:]) == ((length_of_piece, length) if is_masked else None)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width", [8, 32, 80, 192, 256])
def test_one_call_with_variable_lengths_is_that_of_the_sequences(monkeypatch, width, heads, window):
    """With torch's kernel on a GPU, with a naive one on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if not on_gpu:
        monkeypatch.setattr(packing, "varlen_attn", naive_varlen)
        monkeypatch.setattr(packing, "VARLEN_DTYPES", (torch.float32,))
        monkeypatch.setattr(packing, "has_varlen_kernel", lambda device: True)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", None)
    module, states = make_states(heads, width, torch.bfloat16 if on_gpu else torch.float32, device)
    layout = RowLayout(LENGTHS, PARENTS)
    formed = []
    for _ in range(2):  # layers
        actual, _ = packed_sdpa(module, *states, None, layout, sliding_window=window, scaling=0.3)
        assert_that_of_the_sequences(actual, states, window, 2e-2 if on_gpu else 1e-6)
        formed.append(layout._varlen)
    assert formed[0] is formed[1] is not None


@pytest.mark.parametrize(("width", "dtypes"), [(12, (torch.float32,)), (32, packing.VARLEN_DTYPES)])
def test_states_that_the_kernel_does_not_read_take_a_call_for_each_piece(monkeypatch, width, dtypes):
    """Heads of another width, and a model in fp32, for which nothing is formed."""
    monkeypatch.setattr(packing, "varlen_attn", None)
    monkeypatch.setattr(packing, "VARLEN_DTYPES", dtypes)
    monkeypatch.setattr(packing, "has_varlen_kernel", lambda device: True)
    module, states = make_states((2, 2), width)
    layout = RowLayout(LENGTHS, PARENTS)
    actual, _ = packed_sdpa(module, *states, None, layout, scaling=0.3)
    assert_that_of_the_sequences(actual, states, None, 1e-6)
    assert layout._varlen is None
