"""Scoring, loss and backward pass of one update, side by side with TRL's SDPO and GRPO on identical batches.

    python benchmarks/update_phase.py --preset bar      # the shapes of the project's bar; JSON with the ratios last
    python benchmarks/update_phase.py --preset sweep    # against T, K, C, vocabulary and batch; JSON, table and PNG
    python benchmarks/update_phase.py --preset gpu      # on a GPU: torch's and Triton's kernels, see gpu.py

"credit" is this project's trainer (teacher, C contrasts, loss, backward), "sdpo" is TRL's `SDPOTrainer` with
`topk_logits` and a tail (teacher, loss, backward; it has no contrast), "grpo" is TRL's `GRPOTrainer` (loss, backward).
Every implementation lives in a process of its own and they step in turns: ratios are medians of ratios within a round,
peaks are each process's own, above its loaded models.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import step
import torch
from datasets import Dataset
from measure import Sample, in_turns, measured, ratio, seconds, trials
from workload import QUESTIONS, Workload, make_tokenizer, provenance

Update = Callable[[], None]


def build(kind: str, workload: Workload) -> Callable[[dict[str, Any]], Sample]:
    """In the child: load the models, and answer with the measures of one update of the changed workload."""
    directory = tempfile.mkdtemp()
    maker = {"credit": _credit, "sdpo": _sdpo, "grpo": _grpo}[kind]
    make_update = maker(workload, directory)

    def answer(changes: dict[str, Any]) -> Sample:
        update, model = make_update(workload.with_(**changes))
        try:
            with measured(workload.device) as sample:
                update()
        finally:
            model.zero_grad(set_to_none=True)
        return sample

    return answer


def _arguments(workload: Workload, directory: str) -> dict[str, Any]:
    return {
        "output_dir": directory,
        "use_cpu": workload.device == "cpu",
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "loss_type": "grpo",
        "gradient_checkpointing": workload.checkpointing,
        "disable_tqdm": True,
    }


def _no_reward(completions: list, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def _dataset() -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in QUESTIONS]})


def _credit(workload: Workload, directory: str) -> Callable[[Workload], tuple[Update, torch.nn.Module]]:
    from credit_trl import CreditConfig, CreditTrainer
    from credit_trl.contexts.privileged import PrivilegedContext
    from credit_trl.contexts.tokens import TokenContexts

    config = CreditConfig(
        **_arguments(workload, directory),
        contrastive_source="dataset",
        distillation_topk=workload.topk,
        distillation_tail=workload.tail,
        distillation_kernels=workload.kernels,
    )
    trainer = CreditTrainer(workload.make_model(), _no_reward, config, _dataset(), processing_class=make_tokenizer())
    _ready(trainer)

    def make_update(workload: Workload) -> tuple[Update, torch.nn.Module]:
        trainer.args.distillation_topk = workload.topk
        batch = workload.rollouts()
        contexts = [TokenContexts(ids, PrivilegedContext()) for ids in workload.contexts()]

        def update() -> None:
            inputs = batch | trainer._score(batch, contexts)
            trainer.compute_loss(trainer.model, inputs).backward()

        return update, trainer.model

    return make_update


def _sdpo(workload: Workload, directory: str) -> Callable[[Workload], tuple[Update, torch.nn.Module]]:
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    config = SDPOConfig(
        **_arguments(workload, directory),
        distillation_mode="topk_logits",
        distillation_topk=workload.topk,
        distillation_add_tail=True,
        distillation_alpha=1.0,
        teacher_model_kind="ema",
        model_init_kwargs={"dtype": workload.dtype},
    )
    # The teacher is loaded from the student's path.
    model_directory = f"{directory}/model"
    workload.make_model().save_pretrained(model_directory)
    trainer = SDPOTrainer(model_directory, _no_reward, config, _dataset(), processing_class=make_tokenizer())
    shutil.rmtree(model_directory)
    _ready(trainer)

    def make_update(workload: Workload) -> tuple[Update, torch.nn.Module]:
        trainer.args.distillation_topk = workload.topk
        batch = workload.rollouts()
        teacher_prompts = torch.tensor([of_sample[0] for of_sample in workload.contexts()], device=workload.device)
        teacher_ids = torch.cat([teacher_prompts, batch["completion_ids"]], dim=1)
        batch |= {
            "teacher_input_ids": teacher_ids,
            "teacher_attention_mask": torch.ones_like(teacher_ids),
            "self_distillation_mask": torch.ones(workload.batch, device=workload.device),
        }
        return lambda: trainer.compute_loss(trainer.model, batch).backward(), trainer.model

    return make_update


def _grpo(workload: Workload, directory: str) -> Callable[[Workload], tuple[Update, torch.nn.Module]]:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(**_arguments(workload, directory))
    trainer = GRPOTrainer(workload.make_model(), _no_reward, config, _dataset(), processing_class=make_tokenizer())
    _ready(trainer)

    def make_update(workload: Workload) -> tuple[Update, torch.nn.Module]:
        batch = workload.rollouts() | {"advantages": torch.linspace(-1, 1, workload.batch, device=workload.device)}
        return lambda: trainer.compute_loss(trainer.model, batch).backward(), trainer.model

    return make_update


def _ready(trainer: Any) -> None:
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.to(trainer.accelerator.device).train()
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})


def bar(rounds: int, patience: float) -> dict[str, Any]:
    """The shapes of the bar: time and peak at T 512, growth of the peak from T 128 to T 1,024."""
    workload = Workload()
    with trials(build, _kinds(workload)) as running:
        in_turns(running, 1, {"completion": 64})  # warm up
        samples = in_turns(running, rounds, {}, patience=patience)
        by_completion = {
            name: {t: trial.ask({"completion": t}).peak_mb for t in (128, 1024)} for name, trial in running.items()
        }
    peaks = {name: statistics.median(sample.peak_mb for sample in of) for name, of in samples.items()}
    growth = {name: (of[1024] - of[128]) / (1024 - 128) / workload.batch for name, of in by_completion.items()}
    return {
        "workload": vars(workload),
        "samples": {name: [vars(sample) for sample in of] for name, of in samples.items()},
        "seconds": {name: seconds(of) for name, of in samples.items()},
        "peak_mb": peaks,
        "peak_mb_by_completion": by_completion,
        "mb_per_token": growth,
        "ratios": {
            "time_ratio": ratio(samples["credit"], samples["sdpo"]),
            "time_ratio_renormalize": ratio(samples["credit, renormalize"], samples["sdpo"]),
            "memory_ratio": peaks["credit"] / peaks["sdpo"],
            "memory_slope_ratio": growth["credit"] / growth["sdpo"],
        },
    }


def table_of_bar(result: dict[str, Any]) -> str:
    lines = ["| | seconds | peak MB over models | MB a token |", "| --- | --- | --- | --- |"]
    for name, value in result["seconds"].items():
        lines.append(f"| {name} | {value:.2f} | {result['peak_mb'][name]:.0f} | {result['mb_per_token'][name]:.3f} |")
    return "\n".join(lines)


def sweep(rounds: int, patience: float) -> dict[str, Any]:
    """Seconds and peak against one thing at a time: T, K, C, vocabulary, batch."""
    axes = {
        "completion": [128, 256, 512, 1024],
        "topk": [20, 100, 400],
        "contrasts": [0, 1, 2, 8, 16],
        "batch": [1, 2, 4],
        "vocabulary": [32_768, 65_536, 151_936],
    }
    series: dict[str, dict[str, list[dict[str, float]]]] = {}
    for vocabulary in axes["vocabulary"]:  # the one that needs other models
        workload = Workload(vocabulary=vocabulary)
        is_default = vocabulary == Workload.vocabulary
        with trials(build, _kinds(workload)) as running:
            in_turns(running, 1, {"completion": 64})
            for axis, values in axes.items() if is_default else [("vocabulary", [vocabulary])]:
                for value in [vocabulary] if axis == "vocabulary" else values:
                    samples = in_turns(running, rounds, {axis: value}, patience=patience)
                    for name, of in samples.items():
                        point = {"value": value, "seconds": seconds(of), "peak_mb": max(x.peak_mb for x in of)}
                        series.setdefault(axis, {}).setdefault(name, []).append(point)
    return {"workload": vars(Workload()), "series": series}


def table_of_sweep(result: dict[str, Any]) -> str:
    lines = ["| | | seconds | peak MB |", "| --- | --- | --- | --- |"]
    for axis, of_axis in result["series"].items():
        for name, points in of_axis.items():
            cells = [" / ".join(f"{p[key]:{form}}" for p in points) for key, form in _COLUMNS]
            lines.append(f"| {axis} {cells[0]} | {name} | {cells[1]} | {cells[2]} |")
    return "\n".join(lines)


_COLUMNS = (("value", ",d"), ("seconds", ".2f"), ("peak_mb", ".0f"))


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = {"completion": "T", "topk": "K", "contrasts": "C", "batch": "B", "vocabulary": "V"}
    figure, axes = plt.subplots(2, len(names), figsize=(3.2 * len(names), 6), layout="constrained")
    for column, (axis, symbol) in enumerate(names.items()):
        for name, points in result["series"][axis].items():
            values = [p["value"] for p in points]
            axes[0, column].plot(values, [p["seconds"] for p in points], marker="o", label=name)
            axes[1, column].plot(values, [p["peak_mb"] / 1000 for p in points], marker="o", label=name)
        for row, label in enumerate(("seconds", "peak GB over the models")):
            axes[row, column].set_xlabel(symbol)
            axes[row, column].locator_params(axis="x", nbins=4)
            axes[row, column].set_ylim(bottom=0)
            if column == 0:
                axes[row, column].set_ylabel(label)
    axes[0, 0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def _kinds(workload: Workload) -> dict[str, tuple[str, Workload]]:
    return {
        "credit": ("credit", workload),
        "credit, renormalize": ("credit", workload.with_(tail="renormalize")),
        "sdpo": ("sdpo", workload),
        "grpo": ("grpo", workload),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["bar", "sweep", "gpu"], default="bar")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-rounds", type=int, default=2, help="whole steps a C in the bar; 0 leaves them out")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine, each time")
    parser.add_argument(
        "--output", type=Path, default=None, help="a path without suffix for JSON (and PNG of a sweep)"
    )
    arguments = parser.parse_args()
    if arguments.preset == "gpu" and not torch.cuda.is_available():
        parser.error("--preset gpu measures on a GPU, and torch finds none here. --preset bar runs on a CPU.")
    result = provenance()
    if arguments.preset == "gpu":
        result |= gpu.measure(gpu.Plan(), arguments.rounds)
        print(gpu.table(result))
    elif arguments.preset == "sweep":
        result |= sweep(arguments.rounds, arguments.patience)
        print(table_of_sweep(result))
    else:
        result |= bar(arguments.rounds, arguments.patience)
        print(table_of_bar(result))
        if arguments.step_rounds:
            result["step"] = step.measure_steps(Workload(), [0, 1, 16], arguments.step_rounds, arguments.patience)
            print(step.table(result["step"]))
            for c in (1, 16):
                result["ratios"][f"step_ratio_c{c}"] = result["step"]["step_ratio"][str(c)]
    if arguments.output:
        arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        if arguments.preset == "sweep":
            plot(result, arguments.output.with_suffix(".png"))
    if arguments.preset != "sweep":
        print(json.dumps({name: round(value, 4) for name, value in result["ratios"].items()}))


if __name__ == "__main__":
    main()
