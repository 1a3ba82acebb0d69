"""Trainers with a real vLLM engine. `make test-vllm` runs the tests in a separate environment; elsewhere they skip."""

import gc
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")


import pytest
from cpu_engine import HEAD_DIM

from credit_trl import CreditTrainer, Verdict
from faults.launching import free_port
from tiny import build_model


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """An engine keeps its process group and its variables: the tests of a real one share them."""


@pytest.fixture(scope="session")
def model_path(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    # For colocated engines: TRL's default port 29500 may be in use.
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    os.environ["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("vllm_cache"))
    build_model(tokenizer, head_dim=HEAD_DIM).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def verdicts(completions, answer, **kwargs) -> list[Verdict]:
    """Feedback for all samples, and rewards that differ in each group so that the weights change."""
    return [Verdict(float(i % 2), f"The answer is {a}.") for i, a in enumerate(answer)]


@pytest.fixture
def make_trainer(model_path, make_config, dataset):
    def make(peft_config=None, rows=dataset, **options):
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}
        settings = {"max_completion_length": 12, "learning_rate": 1e-2, "max_steps": 3}
        config = make_config(**{**engine, **settings, **options})
        return CreditTrainer(str(model_path), verdicts, config, rows, peft_config=peft_config)

    yield make
    gc.collect()  # the trainer, which holds the engine, is a reference cycle
