"""Fixtures for every test; what scripts need too is in `tiny.py`."""

import contextlib
import gc
import inspect
import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, by the first of these imports that loads the hub's library

from functools import partial
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema
from trl.generation import vllm_generation

from credit_trl import CreditConfig, CreditTrainer
from families import build_family
from isolation import ProcessState
from tiny import QUIET, build_model, build_tokenizer, file_hashes, length_verdicts

with contextlib.suppress(ImportError):  # the environment of the vLLM engine has no hypothesis
    from hypothesis import settings

    # A busy machine is no reason to fail: how long an example takes is not what the tests state.
    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")

OPTIONAL_PROGRAMS = {"bwrap": "the bubblewrap sandbox", "chromium": "pages in a browser"}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each optional program that is missing."""
    for program, tested in OPTIONAL_PROGRAMS.items():
        if shutil.which(program) is None:
            terminalreporter.write_line(f"{program} is not installed: the tests of {tested} are skipped")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that read real data beside the checkout as slow: the fast suite reads the checkout alone."""
    for item in items:
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Exclude what the imports made from garbage collection: each run's end collects, over a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data():
    """The real data beside the project; tests that need it skip where it is absent."""
    folder = Path(__file__).parents[1] / ".." / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real data in ../shared/data (see its README)")
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def make_model(tokenizer):
    return partial(build_model, tokenizer)


@pytest.fixture
def make_family(tokenizer):
    return partial(build_family, tokenizer)


def sums() -> Dataset:
    """Twelve small questions with answers, conversational."""
    system = {"role": "system", "content": "Add."}
    pairs = [(a, b) for a in range(3) for b in range(4)]
    prompts = [[system, {"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, b in pairs]})


@pytest.fixture
def dataset():
    return sums()


def small_config(**overrides) -> CreditConfig:
    """A CreditConfig for CPU, quiet and small; keyword arguments override, and have `output_dir`."""
    small = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 2}
    common = {"learning_rate": 1e-3, "logging_steps": 1, "seed": 1}
    common["packed"] = False  # a CPU's attention without a mask differs in the ninth digit
    return CreditConfig(**{**QUIET, **small, **common, **overrides})


@pytest.fixture
def make_config(tmp_path):
    """`small_config` in the folder `run` of the test."""
    return lambda **overrides: small_config(**{"output_dir": str(tmp_path / "run"), **overrides})


@pytest.fixture(scope="session")
def finished_run(tokenizer, tmp_path_factory):
    """Folder of a run of two steps on `sums()`, with checkpoints, final model, token maps and report."""
    folder = tmp_path_factory.mktemp("finished")
    config = small_config(output_dir=str(folder), save_strategy="steps", save_steps=1)
    trainer = CreditTrainer(build_model(tokenizer), length_verdicts, config, sums(), processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    return folder


@pytest.fixture
def earlier_run(finished_run, tmp_path):
    """A copy of `finished_run` where `make_config` lets runs write."""
    return shutil.copytree(finished_run, tmp_path / "run")


@pytest.fixture
def unharmed(earlier_run):
    """After the test each file of `earlier_run` is as it was, and there is no other."""
    expected = file_hashes(earlier_run)
    yield earlier_run
    assert file_hashes(earlier_run) == expected


@pytest.fixture
def run_callbacks():
    """Trainers of this test have the callbacks that every run has: token maps and the report."""


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """A test leaves no process group, thread, variable, default dtype or working directory behind."""
    state = ProcessState.now()
    yield
    differences = state.differences()
    state.restore()
    assert not differences, f"The test left {', '.join(differences)} behind."


@pytest.fixture(autouse=True)
def only_the_trainer(leaves_nothing_behind, request):
    """Trainers of a test write no page, which takes as long as two steps of a tiny model, unless it asks for it."""
    with pytest.MonkeyPatch.context() as patch:  # which the test's own `monkeypatch.undo` leaves
        if "run_callbacks" not in request.fixturenames:
            patch.setattr("credit_trl.trainer.run_callbacks", lambda trainer: [])
        yield


@pytest.fixture
def make_trainer(make_model, make_config, tokenizer, dataset):
    """A function that builds a trainer on `dataset`; other arguments are the trainer's, or those of `make_config`."""

    def make(reward_funcs=length_verdicts, rows=None, eval_rows=None, **options):
        names = {*inspect.signature(GRPOTrainer).parameters, "token_weight"} & options.keys()
        defaults = {"processing_class": tokenizer} | {name: options.pop(name) for name in names}
        model = defaults.pop("model", None) or make_model()
        return CreditTrainer(model, reward_funcs, make_config(**options), rows or dataset, eval_rows, **defaults)

    return make


@pytest.fixture
def no_engine(monkeypatch):
    """Options of vLLM are accepted, and no engine is started: a `rollout_func` samples."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # TRL sets them; monkeypatch restores them
        monkeypatch.delenv(name)
    engine = SimpleNamespace(sleep=lambda level: None)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", lambda **options: engine, raising=False)
    yield
    if torch.distributed.is_initialized():  # a second trainer joins by TRL's variables
        torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def parsing():
    """The tiny tokenizer with Qwen3's chat template, and the response parser that TRL adds in runs with tools."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = files("trl").joinpath("chat_templates", "qwen3.jinja").read_text("utf-8")
    tokenizer = add_response_schema(tokenizer)
    if getattr(tokenizer, "response_template", None) is None:
        pytest.importorskip("jmespath")  # with which transformers < 5.13 parses
    return tokenizer
