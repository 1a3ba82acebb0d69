r"""CREDIT on LiveCodeBench: programs run in a sandbox; the feedback is the failing test or the traceback.

    accelerate launch examples/livecodebench.py --model_name_or_path Qwen/Qwen3-8B
    python examples/livecodebench.py --task livecodebench:examples --generation_batch_size 64 \
        --model_name_or_path Qwen/Qwen3-0.6B

The first takes the 131 problems of February to May 2025 from the hub, the second the eight that the package brings, in
batches of eight. Where no sandbox holds on this machine, it stops and says what to install; nothing ever runs
unprotected by itself.
"""

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.cli.training import CreditScriptArguments
from credit_trl.evaluation import EvaluationCallback
from credit_trl.evaluation.callback import RunLog
from credit_trl.sandbox import open_sandbox
from credit_trl.tasks import livecodebench, load_task

DEFAULTS = {
    "task": "livecodebench:v6",
    "model_name_or_path": "Qwen/Qwen3-8B",
    "output_dir": "runs/livecodebench",
    "learning_rate": 1e-6,
    "num_train_epochs": 30,
    "num_generations": 8,
    "generation_batch_size": 256,  # 32 problems of 8 programs
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,  # on 8 GPUs 64 rollouts a step: 8 problems of 8 programs
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
    loading = {"dtype": model.dtype, "revision": model.model_revision}
    loading |= {"attn_implementation": model.attn_implementation, **(config.model_init_kwargs or {})}
    config.model_init_kwargs = loading
    rows = task.build("train", script.dataset_path)
    with open_sandbox() as sandbox:
        livecodebench.use_sandbox(sandbox)
        trainer = CreditTrainer(
            model=model.model_name_or_path,
            reward_funcs=task.reward,
            args=config,
            train_dataset=rows if script.max_train_rows is None else rows.take(script.max_train_rows),
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
        )
        evaluation = EvaluationCallback(
            trainer,
            task,
            k=script.avg_at_k,
            eval_steps=script.avg_at_k_steps,
            temperature=script.avg_at_k_temperature,
            top_p=script.avg_at_k_top_p,
            path=script.eval_dataset_path or script.dataset_path,
            max_prompts=script.max_eval_rows,
        )
        trainer.add_callback(RunLog(task=task.name))
        trainer.add_callback(evaluation)
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(f"{config.output_dir}/final")
    for row in evaluation.history:
        print(f"step {row['step']:4}: avg@{row['k']} {row['score']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")


if __name__ == "__main__":
    parser = TrlParser((CreditScriptArguments, CreditConfig, ModelConfig), description=__doc__)
    parser.set_defaults(**DEFAULTS)
    main(*parser.parse_args_and_config())
