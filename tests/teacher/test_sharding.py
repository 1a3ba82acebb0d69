"""run_in_wrapped_forward under FSDP2: precision of inputs and results, and gradients."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from credit_trl.teacher.sharding import full_tensor, run_in_wrapped_forward


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def weighted_states(model, weights, ids):
    """An fp32 loss on bf16 hidden states, and its token weights."""
    hidden = model.base_model(input_ids=ids).last_hidden_state.float()
    return (hidden * weights[..., None]).sum(), {"weights": weights.clone()}


def test_fsdp2_mixed_precision_keeps_loss_inputs_in_fp32(make_model, one_process):
    plain, model = make_model(dtype=torch.bfloat16), make_model(dtype=torch.bfloat16).float()
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=one_process, mp_policy=policy)
    # Accelerate's grouping: norm and head form one group, and a loss on hidden states only uses the norm.
    fully_shard([model.model.norm, model.lm_head], mesh=one_process, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=one_process, mp_policy=policy)
    ids = torch.randint(3, 250, (2, 7), generator=torch.Generator().manual_seed(0))
    weights = torch.rand(2, 7, generator=torch.Generator().manual_seed(1))

    expected, _ = weighted_states(plain, weights, ids)
    (0.3 * expected).backward()
    loss, terms = run_in_wrapped_forward(model, model, partial(weighted_states, model, weights), ids)
    (0.3 * loss).backward()

    assert torch.equal(terms["weights"], weights)
    assert loss.dtype is torch.float32
    assert loss.item() == expected.item() != expected.bfloat16().item()
    gradients = {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, p in plain.named_parameters() if p.grad is not None}
    for name, p in plain.named_parameters():
        if p.grad is not None:
            assert torch.equal(gradients[name], p.grad.float()), name
