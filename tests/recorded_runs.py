"""Short training runs with recorded results: losses, gradient norms and a digest of the final weights.

    python tests/recorded_runs.py record       # rewrite tests/recorded/ from the code that is installed

`tests/recorded/runs.json` was written by version 0.1.0, before the modules moved.
`test_recorded_runs.py` compares.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from tiny import build_model, build_tokenizer, length_verdicts  # isort: skip

import torch
from datasets import Dataset
from peft import LoraConfig

from credit_trl import CreditConfig, CreditTrainer

RECORDED = Path(__file__).parent / "recorded"

# Templates of version 0.1.0.
WORDING = {
    "reprompt_template": "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
    "feedback_template": ("\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"),
}
_SUPPORTS = {
    "teacher_topk": {},
    "renormalize": {"distillation_tail": "renormalize"},
    "sampled": {"distillation_support": "sampled"},
}
# One run a name: options, and whether LoRA is trained.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    f"{weights}-{support}-{coef:g}": ({"contrastive_coef": coef, **options}, weights == "lora")
    for weights in ("full", "lora")
    for support, options in _SUPPORTS.items()
    for coef in (0.0, 0.1)
} | {
    "grpo": ({"distillation_weight": 0.0}, False),
    "mixed": ({"distillation_weight": 0.5, "contrastive_count": 2}, False),
    "guide-jsd": ({"contrastive_form": "guide", "contrastive_coef": 1.0, "distillation_alpha": 0.5}, False),
    "live-iterations": ({"teacher_model_kind": "live", "num_iterations": 2}, False),
}


def machine() -> str:
    """What the last bits of a sum depend on."""
    model = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ""
    )
    instructions = torch.backends.cpu.get_cpu_capability()  # "AVX2" or "AVX512", which one model name may hide
    return f"{platform.machine()} {model.partition(':')[2].strip()} {instructions} torch {torch.__version__}"


def build_trainer(output_dir: Path, options: dict[str, Any], lora: bool = False) -> CreditTrainer:
    """A tiny trainer on twelve sums."""
    tokenizer = build_tokenizer()
    rows = [
        {
            "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{a}+{b}="}],
            "answer": str(a + b),
        }
        for a in range(3)
        for b in range(4)
    ]
    config = CreditConfig(
        **{
            "output_dir": str(output_dir),
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 6,
            "learning_rate": 1e-3,
            "teacher_update_rate": 0.1,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "seed": 1,
            **WORDING,
            **options,
        }
    )
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear") if lora else None
    return CreditTrainer(
        build_model(tokenizer),
        length_verdicts,
        config,
        Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapters,
    )


def result(trainer: CreditTrainer) -> dict[str, Any]:
    """Losses and gradient norms of the logged steps, and a digest of the trained weights."""
    steps = [row for row in trainer.state.log_history if "loss" in row]
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        if parameter.requires_grad:
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().numpy().tobytes())
    return {
        "loss": [row["loss"] for row in steps],
        "grad_norm": [float(row["grad_norm"]) for row in steps],
        "weights": digest.hexdigest(),
    }


def run(name: str, output_dir: Path) -> dict[str, Any]:
    """Train one case from its start."""
    options, lora = CASES[name]
    trainer = build_trainer(output_dir, options, lora)
    trainer.train()
    return result(trainer)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    recorded: dict[str, Any] = {"machine": machine(), "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            recorded["runs"][name] = run(name, Path(folder) / name)
    (RECORDED / "runs.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__" and sys.argv[1:] == ["record"]:
    main()
