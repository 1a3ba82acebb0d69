"""Options that replace a GPU, a cluster, the hub or hours in documented lines, and lines that are not run.

Each entry has its reason. Of a repeated option the last value counts, so options are appended to the unchanged line.
"""

from __future__ import annotations

from blocks import Command

# Beginning of a line → why it is not run. Its script still parses the line.
NOT_RUN = {
    "python benchmarks/update_phase.py --preset gpu": "it measures GPUs",
    "vllm serve Qwen/Qwen3-8B --host 127.0.0.1": "it needs four GPUs; the other flags, of docs/vllm.md, run",
}
# Beginning of a command within a sentence of a page that new users copy from → why no test runs it as it stands.
NOT_RUN_INLINE = {
    "hf download": "it downloads gigabytes from the hub",
    "pip install flash-attn": "it needs a GPU and CUDA's compiler",
    "pip install kernels": "its kernels run on GPUs",
    'pip install "credit_trl-0.3.0': "tests/packaging installs the wheel",
    "python3 -m venv": "test_installation.py makes the environment",
}
HUB_ROWS = "data/sciknoweval"  # synthetic rows
OPTIONS = {
    "cpu": ("--use_cpu true --bf16 false", "there is no GPU"),
    "model": ("--model_name_or_path {model}", "the model is on the hub: a random one of the same family"),
    "step": (
        "--max_steps 1 --max_completion_length 4",
        "one step with short completions: seconds, not hours",
    ),
    "rollouts": (
        "--per_device_train_batch_size 4 --num_generations 2 --gradient_accumulation_steps 1",
        "four rollouts per process and step: seconds, not hours",
    ),
    "score": ("--avg_at_k 1 --max_eval_rows 2", "two completions per evaluation: seconds, not hours"),
    "rows": (f"--dataset_path {HUB_ROWS}", "the dataset is on the hub: synthetic rows"),
    "problems": (
        "--task livecodebench:examples --generation_batch_size 8",
        "the problems are on the hub: the eight of the package, four per batch",
    ),
    "transformers": ("--use_vllm false", "vLLM needs an environment of its own: tests/vllm_engine runs it"),
    "processes": ("--num_processes 2", "two CPU processes in place of the file's eight GPUs"),
    "whole": ("--load_in_4bit false", "without bitsandbytes; `make test-slow` trains QLoRA with it"),
    "pairs": ("--max_steps 2", "two steps in place of thirty: seconds, not a minute"),
    "branches": (
        "--questions 32 --epochs 1 --steps 2 --noisy_steps 2 --prompts 3 --positions 1 --candidates 2 --samples 2",
        "a thousandth of the experiment: seconds, not an hour",
    ),
    "sweep": (
        "--seeds 1 --steps 1 --processes 1",
        "one step with one seed, from the package's base model: minutes, not hours",
    ),
    "world": ("--seeds 1 --steps 1 --jobs 1", "as sweep"),
    "output": (
        "--output_dir run --report_to none --disable_tqdm true",
        "the folder that the test reads",
    ),
}

_TRAINED = ("cpu", "model", "step", "output")
LINES = {  # beginning of a line → names in OPTIONS; the longest match counts
    "trl credit --task sciknoweval:chemistry": (*_TRAINED, "rows", "processes"),
    "sbatch": (*_TRAINED, "rollouts", "score", "problems", "transformers"),
    "accelerate launch examples/livecodebench.py": (*_TRAINED, "rollouts", "score", "problems"),
    "accelerate launch examples/multi_turn_tools.py": (*_TRAINED, "rollouts", "transformers"),
    "accelerate launch examples/sciknoweval.py": (*_TRAINED, "rollouts", "score", "rows"),
    "accelerate launch examples/toolalpaca.py": (*_TRAINED, "rollouts", "score"),
    "python examples/credit_dpo.py": ("pairs",),
    "python examples/custom_verifier.py": (),
    "python examples/custom_verifier.py --model_name_or_path": (*_TRAINED, "rollouts"),
    "python examples/interventional_credit.py": ("branches",),
    "python examples/livecodebench.py": (*_TRAINED, "score"),
    "python examples/lora_single_gpu.py": (*_TRAINED, "rollouts", "rows"),
    "python examples/lora_single_gpu.py --load_in_4bit": (*_TRAINED, "rollouts", "rows", "whole"),
    "python examples/multi_turn_tools.py": (*_TRAINED, "rollouts"),
    "python examples/sciknoweval.py": (*_TRAINED, "rollouts", "score"),
    "python examples/toolalpaca.py": (*_TRAINED, "rollouts", "score"),
    "python notebooks/run.py": (),
    "python run.py": ("sweep",),  # examples/study, as the next six
    "python run.py --world weak": ("world",),
    "python world_page.py": (),
    "python tokens.py": (),
    "python report.py": (),
    "python forms.py": (),
    "python settled.py": (),
}


def is_not_run(command: Command) -> bool:
    """Whether a line is in `NOT_RUN`."""
    return " ".join(command.words).startswith(tuple(NOT_RUN))


def appended(command: Command, model: str) -> list[str]:
    """Words that are appended to a line.

    Raises:
        KeyError: `LINES` has no entry for the line.
    """
    line = " ".join(command.words)
    beginning = max((known for known in LINES if line.startswith(known)), key=len, default=None)
    if beginning is None:
        raise KeyError(f"{command}: no entry in LINES matches {line!r}. Add one with the options that it needs.")
    return [word.format(model=model) for name in LINES[beginning] for word in OPTIONS[name][0].split()]
