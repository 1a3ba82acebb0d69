"""Step 2 of 8: train the shipped model on the rows and the verifier of step 1, in about a minute on a CPU.

python examples/02_train.py     # runs/ladder: the model, its log, and report.html
"""

from importlib import import_module

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.tasks.quickstart import TEMPLATES

verifier = import_module("01_verifier")
MODEL = "quickstart"  # shipped with the package; a name of the hub or a folder, such as "Qwen/Qwen3-0.6B"
TRAIN_CITIES = "Paris London Madrid Rome Berlin Vienna Oslo Cairo"
OPTIONS = {
    "max_steps": 20,
    "per_device_train_batch_size": 32,  # 8 prompts a step
    "num_generations": 4,  # with 4 answers each
    "max_completion_length": 32,
    # For the shipped model, which is very small and was pretrained with these words; remove them with it.
    "learning_rate": 2e-3,
    "distillation_alpha": 0.0,
    **TEMPLATES,
    # Remove where there is a GPU.
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 5,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}

if __name__ == "__main__":
    config = CreditConfig("runs/ladder", contrastive_coef=0.1, **OPTIONS)  # λ
    trainer = CreditTrainer(MODEL, verifier.check, config, verifier.make_rows(TRAIN_CITIES))
    trainer.train()
    trainer.save_model()
