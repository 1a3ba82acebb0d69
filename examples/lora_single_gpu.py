"""CREDIT with LoRA on one GPU: policy, teacher and generation share the frozen base.

    python examples/lora_single_gpu.py                                   # Qwen3-4B in 24 GB
    python examples/lora_single_gpu.py --load_in_4bit --model_name_or_path Qwen/Qwen3-8B    # QLoRA

The teacher is a second adapter, a moving average of the policy's. Only the policy's adapter is saved.
"""

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.cli.training import CreditScriptArguments, first_rows, model_init_kwargs
from credit_trl.tasks import load_task

DEFAULTS = {
    "task": "sciknoweval:chemistry",
    "model_name_or_path": "Qwen/Qwen3-4B",
    "output_dir": "runs/lora",
    "use_peft": True,
    "lora_r": 32,
    "lora_alpha": 64,
    "lora_target_modules": "all-linear",
    "dtype": "bfloat16",  # of the frozen base; the adapters are fp32
    "learning_rate": 1e-5,  # about ten times that of full fine-tuning
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "max_steps": 200,
    "num_generations": 8,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 16,  # 64 rollouts per step: 8 for each of 8 questions
    "max_completion_length": 1024,
    "max_reprompt_len": 4096,
    "scoring_batch_tokens": 8192,  # tokens per pass of the teacher; decrease to save memory
    "distillation_alpha": 0.5,
    "distillation_topk": 100,
    "contrastive_coef": 0.1,  # λ; 0 is SDPO
    "chat_template_kwargs": {"enable_thinking": False},
    "logging_steps": 1,
    "save_steps": 50,
    "report_to": "none",
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
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in trainer.model.parameters())
    print(f"{trained:,} of {total:,} parameters are trained")
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(f"{config.output_dir}/adapter")


if __name__ == "__main__":
    parser = TrlParser((CreditScriptArguments, CreditConfig, ModelConfig), description=__doc__)
    parser.set_defaults(**DEFAULTS)
    main(*parser.parse_args_and_config())
