"""What a documented line gets here in place of a GPU, a cluster, the hub, or hours, and what is not run at all.

All of it, each with its reason. An option that is given twice counts as it is given last, so options are appended to a
line, which itself stays as it stands on the page.
"""

from __future__ import annotations

from blocks import Command

# The beginning of a line → why it is not run. Its script reads the line all the same, and is stopped there.
NOT_RUN = {
    "python benchmarks/update_phase.py --preset gpu": "it measures GPUs; the presets for a CPU are measured on one",
}
QUESTIONS_OF_THE_HUB = "data/sciknoweval"  # rows that are made here
OPTIONS = {
    "cpu": ("--use_cpu true --bf16 false", "there is no GPU"),
    "model": ("--model_name_or_path {model}", "the model lies on the hub: a random one of the same family"),
    "step": ("--max_steps 1 --max_completion_length 4", "one step with answers of four tokens: seconds, not hours"),
    "rollouts": (
        "--per_device_train_batch_size 4 --num_generations 2 --gradient_accumulation_steps 1",
        "four rollouts a process and step: seconds, not hours",
    ),
    "score": ("--avg_at_k 1 --max_eval_rows 2", "two answers a test: seconds, not hours"),
    "questions": (f"--dataset_path {QUESTIONS_OF_THE_HUB}", "the questions lie on the hub: rows that are made here"),
    "problems": (
        "--task livecodebench:examples --generation_batch_size 8",
        "the problems lie on the hub: the eight of the package, four to a batch",
    ),
    "transformers": ("--use_vllm false", "vLLM needs an environment of its own: tests/vllm_engine runs it"),
    "attention": ("--attn_implementation sdpa", "flash attention is for GPUs"),
    "processes": ("--num_processes 2", "two processes of this CPU for the file's eight GPUs"),
    "whole": ("--load_in_4bit false", "without bitsandbytes; `make test-slow` trains QLoRA with it"),
    "pairs": ("--max_steps 2", "two steps for thirty: seconds, not a minute"),
    "branches": (
        "--questions 32 --epochs 1 --steps 2 --noisy_steps 2 --prompts 3 --positions 1 --candidates 2 --samples 2",
        "a thousandth of the experiment: seconds, not an hour",
    ),
    "sweep": (
        "--seeds 1 --steps 1 --processes 1",
        "one step with one seed, from the base of the package for every base: minutes, not hours",
    ),
    "output": ("--output_dir run --report_to none --disable_tqdm true", "where the test looks, and nothing else"),
}

_TRAINED = ("cpu", "model", "step", "output")
LINES = {  # by the words that a line begins with; the longest counts
    "trl credit --task sciknoweval:chemistry": (*_TRAINED, "questions", "processes"),
    "sbatch": (*_TRAINED, "rollouts", "score", "problems", "transformers", "attention"),
    "accelerate launch examples/livecodebench.py": (*_TRAINED, "rollouts", "score", "problems"),
    "accelerate launch examples/multi_turn_tools.py": (*_TRAINED, "rollouts", "transformers"),
    "accelerate launch examples/sciknoweval.py": (*_TRAINED, "rollouts", "score", "questions"),
    "accelerate launch examples/toolalpaca.py": (*_TRAINED, "rollouts", "score"),
    "python examples/credit_dpo.py": ("pairs",),
    "python examples/custom_verifier.py": (),
    "python examples/custom_verifier.py --model_name_or_path": (*_TRAINED, "rollouts"),
    "python examples/interventional_credit.py": ("branches",),
    "python examples/livecodebench.py": (*_TRAINED, "score"),
    "python examples/lora_single_gpu.py": (*_TRAINED, "rollouts", "questions"),
    "python examples/lora_single_gpu.py --load_in_4bit": (*_TRAINED, "rollouts", "questions", "whole"),
    "python examples/multi_turn_tools.py": (*_TRAINED, "rollouts"),
    "python examples/sciknoweval.py": (*_TRAINED, "rollouts", "score"),
    "python examples/toolalpaca.py": (*_TRAINED, "rollouts", "score"),
    "python notebooks/run.py": (),
    "python run.py": ("sweep",),  # of examples/study, where the next four are too
    "python tokens.py": (),
    "python report.py": (),
    "python forms.py": (),
    "python settled.py": (),
}


def is_left(command: Command) -> bool:
    """Whether a line is one of `NOT_RUN`."""
    return " ".join(command.words).startswith(tuple(NOT_RUN))


def appended(command: Command, model: str) -> list[str]:
    """The words that a line gets besides its own.

    Raises:
        KeyError: nobody has said how this line is run here.
    """
    line = " ".join(command.words)
    beginning = max((known for known in LINES if line.startswith(known)), key=len, default=None)
    if beginning is None:
        raise KeyError(f"{command}: say in LINES what this line needs to run here: {line}")
    return [word.format(model=model) for name in LINES[beginning] for word in OPTIONS[name][0].split()]
