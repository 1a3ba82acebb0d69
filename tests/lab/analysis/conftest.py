"""Models and responses whose maps are measured."""

import pytest
import torch

from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import Rollout, analysis_config


@pytest.fixture
def config():
    return analysis_config(contrastive_count=2)


@pytest.fixture
def respond(tokenizer):
    """Factory of a rollout with the given text."""

    def make(text, **overrides):
        defaults = {
            "identifier": "r0",
            "prompt": [{"role": "user", "content": "Name the capital of France."}],
            "token_ids": (*tokenizer(text)["input_ids"], tokenizer.eos_token_id),
            "privileged": PrivilegedContext(feedback="The answer is Paris."),
            "contrasts": tuple([{"role": "user", "content": f"Add {k} and {k}."}] for k in (1, 2)),
            "reward": 1.0,
        }
        return Rollout(**{**defaults, **overrides})

    return make


@pytest.fixture
def checkpoint(make_model, tokenizer):
    """A policy and a lagged teacher, in fp64."""
    models = [make_model(seed=seed, dtype=torch.float64) for seed in (0, 1)]
    return Checkpoint.from_model(models[0], tokenizer, teacher=models[1], name="step-1")
