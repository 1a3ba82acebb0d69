"""GRPO's loss of packed rows in two processes: the weights are those of TRL's pass of padded rows."""

import pytest
import torch

from distributed.launching import TYPES, finished, launch, losses, needs, weights
from packed_runs import LOSSES, TABLES, loss_options
from tiny import save_model

COMMON = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "batch": 8}


@pytest.mark.slow
@pytest.mark.parametrize("options", TABLES["wrapped"], ids=str)
@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("wrapper", TYPES)
def test_packed_rows_in_two_processes_equal_padded_ones(tmp_path, wrapper, weight, options):
    needs(wrapper)
    runs = {}
    for packed in (True, False):
        folder = tmp_path / str(packed)
        facts = finished(
            launch(folder, 2, wrapper=wrapper, packed=packed, distillation_weight=weight, **COMMON | options)
        )
        runs[packed] = losses(facts), weights(folder)["weights"]
    torch.testing.assert_close(runs[True], runs[False], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cells", [LOSSES, loss_options()], ids=["loss types", "options"])
def test_packed_grpo_equals_trls_in_two_processes(tmp_path, cells):
    model = save_model(tmp_path / "model")  # transformers saves in the first process alone
    for process in finished(launch(tmp_path, 2, limit=3500, job="packed_run", model=model, cells=cells)):
        assert set(process["differences"].values()) == {""}, process["differences"]
