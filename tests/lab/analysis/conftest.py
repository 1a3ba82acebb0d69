"""Models and responses whose maps are measured, and a browser that shows them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import Rollout, analysis_config
from credit_trl.lab.analysis.tokenmap import TokenMap, map_response

# Chromium without features that use the network.
BROWSER_ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture
def config():
    return analysis_config(contrastive_count=2)


@pytest.fixture
def respond(tokenizer):
    """Factory of a rollout with the given text."""

    def make(text: str, **overrides: Any) -> Rollout:
        given = {
            "identifier": "r0",
            "prompt": [{"role": "user", "content": "Name the capital of France."}],
            "token_ids": (*tokenizer(text)["input_ids"], tokenizer.eos_token_id),
            "privileged": PrivilegedContext(feedback="The answer is Paris."),
            "contrasts": tuple([{"role": "user", "content": f"Add {k} and {k}."}] for k in (1, 2)),
            "reward": 1.0,
        }
        return Rollout(**{**given, **overrides})

    return make


@pytest.fixture
def checkpoint(make_model, tokenizer) -> Checkpoint:
    """A policy and a lagged teacher, in fp64."""
    models = [make_model(seed=seed, dtype=torch.float64) for seed in (0, 1)]
    return Checkpoint.of(models[0], tokenizer, teacher=models[1], name="step-1")


@pytest.fixture
def model_map(checkpoint, respond, config) -> TokenMap:
    return map_response(checkpoint, respond("Paris is the capital."), config, alternatives=3)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser; skips if none is installed. Playwright keeps an event loop running until it ends."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install credit-trl[dev]")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        yield launched
        launched.close()
