r"""`trl credit` as a script to copy: trains on a task of the paper, evaluates during training, saves the model.

    accelerate launch examples/train_task.py --config examples/recipes/sciknoweval_qwen3_8b.yaml
    accelerate launch examples/train_task.py --config examples/recipes/toolalpaca_qwen3_8b.yaml \
        --dataset_path ToolAlpaca/data
    python examples/train_task.py --config examples/sciknoweval_cpu.yaml --max_steps 10

A recipe has the paper's settings. Accepts all options of `CreditConfig` and TRL's `ModelConfig`. LiveCodeBench runs
programs in a sandbox: without one an error names what to install, and programs do not run unprotected unless
`--allow_unsandboxed` is given.
"""

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.cli.data import CreditScriptArguments, describe, first_rows
from credit_trl.cli.training import evaluate_during_training, model_init_kwargs
from credit_trl.tasks import load_task


def main(script: CreditScriptArguments, config: CreditConfig, model: ModelConfig) -> None:
    task = load_task(script.task)
    config.model_init_kwargs = model_init_kwargs(model, config)
    trainer = CreditTrainer(
        model=model.model_name_or_path,
        reward_funcs=task.reward,
        args=config,
        train_dataset=first_rows(task.build("train", script.dataset_path), script.max_train_rows),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    if script.avg_at_k is None:
        trainer.run_log.facts["data"] = describe(script, config.reward_weights)  # for `credit-eval` of the run
    else:
        evaluation = evaluate_during_training(trainer, script)  # keeps the best model
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(f"{config.output_dir}/final")
    if script.avg_at_k is not None:
        print(evaluation)


if __name__ == "__main__":
    parser = TrlParser((CreditScriptArguments, CreditConfig, ModelConfig), description=__doc__)
    # A recipe also names the configuration of `accelerate launch`, which is no option of these classes.
    main(*parser.parse_args_and_config(fail_with_unknown_args=False))
