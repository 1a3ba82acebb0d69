"""The attention of packed rows against dense attention of each sequence, and the masks that it forms."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from credit_trl.teacher.packing import RowLayout, packed_sdpa

# Four pieces: a prefix of three sequences, one of which continues by a single token, and a sequence of its own.
LAYOUT = RowLayout([12, 5, 7, 1, 20], [None, 0, 0, 0, None])
SHARED = 19  # tokens of the longest sequence that shares the prefix


def dense(query, key, value, window):
    """Attention of one sequence from every pair of its tokens, in fp64."""
    query, key, value = (x.double() for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    distance = torch.arange(key.shape[2])[:, None] - torch.arange(key.shape[2])
    is_seen = (distance >= 0) & (distance < (window or key.shape[2]))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~is_seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, SHARED, 9, 1])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_attention_is_that_of_the_sequences_and_masks_only_a_shorter_window(monkeypatch, heads, window):
    attend = nn.functional.scaled_dot_product_attention
    masks = []

    def counted(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, count, sum(LAYOUT.lengths), 8, generator=generator).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]
    module = SimpleNamespace(is_causal=True, num_key_value_groups=heads[0] // heads[1], training=False)
    found, _ = packed_sdpa(module, *states, None, LAYOUT, sliding_window=window, scaling=0.3)
    pieces = torch.arange(sum(LAYOUT.lengths)).split(LAYOUT.lengths)
    expected = []
    for own, parent in zip(pieces, LAYOUT.parents, strict=True):
        whole = own if parent is None else torch.cat([pieces[parent], own])
        expected.append(dense(*(x[:, :, whole] for x in states), window)[:, -len(own) :])
    expected = torch.cat(expected, dim=1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    weights = torch.randn(found.shape, generator=generator)
    gradients = (torch.autograd.grad((of * weights).sum(), states) for of in (found, expected))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    assert len(masks) == len(LAYOUT.lengths)
    assert sum(mask is not None for mask in masks) == {None: 0, SHARED: 1}.get(window, 5)
