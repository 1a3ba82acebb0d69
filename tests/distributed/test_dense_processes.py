"""Two processes with half of a batch each equal the dense Algorithm 1 on the whole batch, in fp64."""

import pytest
import torch

from dense import gradients, naive_loss, scoring_model, step_problem
from distributed.launching import finished, launch


@pytest.mark.parametrize("topk", [5, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss_type", ["grpo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_two_processes_equal_algorithm_1(tmp_path, make_config, tokenizer, topk, loss_type):
    options = {"num_generations": 2, "per_device_train_batch_size": 4, "steps_per_generation": 1, "seed": 5}
    options |= {"contrastive_count": 2, "contrastive_coef": 0.3, "distillation_topk": topk, "loss_type": loss_type}
    finished(launch(tmp_path, 2, job="dense_run", **options))
    problem = step_problem(tokenizer, make_config(**options))
    expected = naive_loss(problem, scoring_model(problem), over_tokens=loss_type == "dapo")
    weights = gradients(expected, problem.policy)
    for rank in range(2):
        stored = torch.load(tmp_path / f"gradients_{rank}.pt", weights_only=True)
        torch.testing.assert_close(stored["loss"], expected.detach(), rtol=1e-12, atol=1e-12)
        assert stored["gradients"].keys() == weights.keys()
        for name, gradient in weights.items():
            torch.testing.assert_close(stored["gradients"][name], gradient, rtol=1e-12, atol=1e-12)
