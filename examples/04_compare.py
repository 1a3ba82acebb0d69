"""Step 4 of 8: GRPO, SDPO and CREDIT on the same rows, and one page that compares them on other rows.

python examples/04_compare.py     # two or three minutes; runs/arms/comparison.html
"""

from importlib import import_module

from credit_trl import CreditConfig, CreditTrainer, EvaluationCallback
from credit_trl.lab.report import write_report

verifier = import_module("01_verifier")
settings = import_module("02_train")
evaluation = import_module("03_evaluate")
ARMS = {"grpo": {"distillation_weight": 0.0}, "sdpo": {"contrastive_coef": 0.0}, "credit": {"contrastive_coef": 0.1}}


def train(name: str, options: dict[str, float]) -> str:
    """Folder of a run with these options, evaluated before the first step and after the last."""
    config = CreditConfig(f"runs/arms/{name}", **settings.OPTIONS, **options)
    rows = verifier.make_rows(settings.TRAIN_CITIES)
    trainer = CreditTrainer(settings.MODEL, verifier.check, config, rows)
    trainer.add_callback(EvaluationCallback(trainer, evaluation.TASK, 4, config.max_steps, keep_best=False))
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()  # README.md: method, teacher, data, score and commit
    return config.output_dir


if __name__ == "__main__":
    runs = [train(name, options) for name, options in ARMS.items()]
    page = write_report(runs, "runs/arms/comparison.html")
    print(page.with_suffix(".md").read_text("utf-8"))
