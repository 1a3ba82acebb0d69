"""CREDIT on ToolAlpaca: tool calls, with a comparison of the made and the expected calls as feedback.

    accelerate launch examples/toolalpaca.py --dataset_path data/train_data.json --eval_dataset_path data/test.json
    python examples/toolalpaca.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_path data/train_data.json

Also writes token maps of a few responses during training (`credit_maps/step-….json`), and at the end the responses to
the test questions and their score (`test/`).
"""

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.cli.training import CreditScriptArguments, first_rows, model_init_kwargs
from credit_trl.evaluation import evaluate
from credit_trl.tasks import load_task

DEFAULTS = {
    "task": "toolalpaca",
    "model_name_or_path": "Qwen/Qwen3-8B",
    "output_dir": "runs/toolalpaca",
    "learning_rate": 1e-6,
    "warmup_steps": 10,
    "num_train_epochs": 3,
    "num_generations": 8,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 16,  # 256 rollouts per step on 8 GPUs: 8 for each of 32 requests
    "max_completion_length": 2048,
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
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(f"{config.output_dir}/final")
    result = evaluate(
        trainer,
        task,
        k=script.avg_at_k,
        temperature=script.avg_at_k_temperature,
        top_p=script.avg_at_k_top_p,
        path=script.eval_dataset_path or script.dataset_path,
        max_prompts=script.max_eval_rows,
        max_completion_length=config.max_completion_length,
        output_dir=f"{config.output_dir}/test",
    )
    print(result)


if __name__ == "__main__":
    parser = TrlParser((CreditScriptArguments, CreditConfig, ModelConfig), description=__doc__)
    parser.set_defaults(**DEFAULTS)
    main(*parser.parse_args_and_config())
