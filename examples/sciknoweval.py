"""CREDIT on SciKnowEval: multiple-choice science questions, with the correct letter as feedback.

    accelerate launch examples/sciknoweval.py --task sciknoweval:physics --model_name_or_path Qwen/Qwen3-8B
    python examples/sciknoweval.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_path data/chemistry.jsonl

Defaults are the paper's for science questions. Accepts all options of `CreditConfig` and TRL's `ModelConfig`.
"""

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.cli.training import CreditScriptArguments, evaluate_during_training, first_rows, model_init_kwargs
from credit_trl.tasks import load_task

DEFAULTS = {
    "task": "sciknoweval:chemistry",
    "model_name_or_path": "Qwen/Qwen3-8B",
    "output_dir": "runs/sciknoweval",
    "learning_rate": 1e-6,
    "warmup_steps": 10,
    "num_train_epochs": 3,
    "num_generations": 8,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 16,  # 256 rollouts per step on 8 GPUs: 8 for each of 32 questions
    "max_completion_length": 8192,
    "distillation_alpha": 0.5,  # Jensen-Shannon
    "distillation_topk": 100,
    "contrastive_coef": 0.1,  # λ; 0 is SDPO
    "contrastive_count": 1,  # C
    "chat_template_kwargs": {"enable_thinking": False},
    "logging_steps": 1,
    "report_to": "none",
    "avg_at_k": 16,
}


def main(script: CreditScriptArguments, config: CreditConfig, model: ModelConfig) -> None:
    task = load_task(script.task)
    config.model_init_kwargs = model_init_kwargs(model, config)
    rows = task.build("train", script.dataset_path)
    trainer = CreditTrainer(
        model=model.model_name_or_path,
        reward_funcs=task.reward,
        args=config,
        train_dataset=first_rows(rows, script.max_train_rows),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    evaluation = evaluate_during_training(trainer, script)  # avg@k every five steps; keeps the best model
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(f"{config.output_dir}/final")
    print(evaluation)


if __name__ == "__main__":
    parser = TrlParser((CreditScriptArguments, CreditConfig, ModelConfig), description=__doc__)
    parser.set_defaults(**DEFAULTS)
    main(*parser.parse_args_and_config())
