r"""CREDIT on LiveCodeBench: programs run in a sandbox, with the failing test or the traceback as feedback.

    accelerate launch examples/livecodebench.py --model_name_or_path Qwen/Qwen3-8B
    python examples/livecodebench.py --task livecodebench:examples --generation_batch_size 64 \
        --model_name_or_path Qwen/Qwen3-0.6B

The first loads the 131 problems of February to May 2025 from the hub. The second uses the eight problems of the
package, in batches of eight. Without an available sandbox, an error names what to install; programs do not run
unprotected unless `--allow_unsandboxed` is given.
"""

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.cli.training import CreditScriptArguments, evaluate_during_training, first_rows, model_init_kwargs
from credit_trl.tasks import load_task

DEFAULTS = {
    "task": "livecodebench:v6",
    "model_name_or_path": "Qwen/Qwen3-8B",
    "output_dir": "runs/livecodebench",
    "learning_rate": 1e-6,
    "num_train_epochs": 30,
    "num_generations": 8,
    "generation_batch_size": 256,  # 8 programs for each of 32 problems
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,  # 64 rollouts per step on 8 GPUs: 8 for each of 8 problems
    "max_completion_length": 8192,
    "distillation_alpha": 1.0,  # reverse KL
    "distillation_topk": 20,
    "contrastive_coef": 0.1,  # λ; 0 is SDPO
    "contrastive_count": 1,  # C
    "chat_template_kwargs": {"enable_thinking": False},
    "logging_steps": 1,
    "report_to": "none",
    "avg_at_k": 4,
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
    evaluation = evaluate_during_training(trainer, script)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(f"{config.output_dir}/final")
    print(evaluation)


if __name__ == "__main__":
    parser = TrlParser((CreditScriptArguments, CreditConfig, ModelConfig), description=__doc__)
    parser.set_defaults(**DEFAULTS)
    main(*parser.parse_args_and_config())
