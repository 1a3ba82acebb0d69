"""A long run with evaluations, and hashing beside writing: memory, descriptors and time do not grow."""

import gc
import os
import shutil
import statistics
import time

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

from credit_trl import EvaluationCallback
from credit_trl.tasks.task import Task
from credit_trl.training import checkpoints
from tiny import length_verdicts

MIB = 2**20


class Usage(TrainerCallback):
    """Memory in MiB and open descriptors of this process, every hundred steps."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % 100 == 0:
            gc.collect()
            process = psutil.Process()
            self.samples.append((process.memory_info().rss / MIB, process.num_fds()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousand_steps_and_120_evaluations_do_not_grow(make_trainer, dataset):
    """From step 300 on: before, caches of torch and of the tokenizer fill."""
    saving = {"save_strategy": "steps", "save_steps": 100, "save_total_limit": 1}
    trainer = make_trainer(max_steps=1000, logging_steps=10, **saving)
    usage = Usage()
    trainer.add_callback(usage)
    task = Task.from_dataset(dataset.select(range(2)), length_verdicts)
    evaluations = EvaluationCallback(trainer, task, k=1, eval_steps=8, keep_best=False, max_completion_length=4)
    trainer.add_callback(evaluations)
    trainer.train()
    assert len(evaluations.history) >= 120
    memory, descriptors = zip(*usage.samples, strict=True)
    assert memory[-1] - memory[2] < 24.0, memory
    assert descriptors[-1] <= descriptors[2], descriptors


@pytest.mark.slow
def test_hashing_takes_three_percent_of_writing(tmp_path, monkeypatch, capsys):
    """A checkpoint waits for its hashes after it is on disk; median of five, of 200 MB."""
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip("other programs use the processors")
    ends: list[float] = []  # when the files are on disk, when their hashes are known, when the manifest is written

    def timed(function):
        def call(*args):
            ends.append(time.perf_counter())
            function(*args)
            ends.append(time.perf_counter())

        return call

    for name in ("sync_to_disk", "write_manifest"):
        monkeypatch.setattr(checkpoints, name, timed(getattr(checkpoints, name)))
    weights = {"weight": torch.randn(50_000_000)}
    shares = []
    for number in range(5):
        folder = tmp_path / "unfinished"
        folder.mkdir()
        began = time.perf_counter()
        save_file(weights, folder / "model.safetensors")
        checkpoints.finish(folder, tmp_path / f"checkpoint-{number}")
        _, on_disk, _, finished = ends
        ends.clear()
        shares.append((finished - on_disk) / (on_disk - began))
        shutil.rmtree(tmp_path / f"checkpoint-{number}")
    share = statistics.median(shares)
    with capsys.disabled():
        print(f"\nHashing takes {share:.2%} of the time of writing, {min(shares):.2%} to {max(shares):.2%}.")
    assert share <= 0.03
