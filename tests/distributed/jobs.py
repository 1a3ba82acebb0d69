"""One process of a small deterministic run, forked from a server that has imported everything.

Completions, verdicts and questions are those of `credit_run`; `options` say what is wrapped how, and what is odd about
the batch. Each process writes what it saw: the wrapper, its losses, and how many collectives it took part in.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import tiny
from credit_trl import CreditConfig, CreditTrainer, Verdict
from credit_trl.evaluation import EvaluationCallback
from credit_trl.tasks.registry import Task, batch_of
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.sharding import full_shape
from distributed import cpu_fsdp2, credit_run, standin_engine

GROUP = credit_run.GROUP
QUESTIONS = [
    {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a in range(4) for b in range(5)
]
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}


# ---------------------------------------------------------------------------------------------- batches that are odd


def one_token(prompts, trainer):
    """Completions that are over with their first token."""
    generated = credit_run.deterministic_rollouts(prompts, trainer)
    generated["completion_ids"] = [[trainer.processing_class.eos_token_id] for _ in prompts]
    return generated


def never_ending(prompts, trainer):
    """Completions that are all cut at the limit."""
    generated = credit_run.deterministic_rollouts(prompts, trainer)
    limit, filler = trainer.args.max_completion_length, trainer.processing_class("7")["input_ids"]
    generated["completion_ids"] = [(ids[:-1] + filler * limit)[:limit] for ids in generated["completion_ids"]]
    return generated


def silent_second_half(completions, answer, trainer_state=None, **kwargs):
    """No success and no feedback on every process but the first: nothing there has a teacher."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return [Verdict(0.0) for _ in completions]
    return credit_run.verdicts(completions, answer)


def spoken_of_on_the_second(completions, answer, trainer_state=None, **kwargs):
    """Success on the first process, with nothing said; on all others feedback, and of a turn that is not there."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        return [Verdict(float(i % GROUP == 0)) for i, _ in enumerate(completions)]
    return [Verdict(0.0, "no", turn_feedback={9: "nor this"}) for _ in completions]


ROLLOUTS = {"hashed": credit_run.deterministic_rollouts, "one token": one_token, "truncated": never_ending}
VERDICTS = {
    "some": credit_run.verdicts,
    "first process only": silent_second_half,
    "feedback on the second process": spoken_of_on_the_second,
}


# -------------------------------------------------------------------------------------------------------- evaluation


def grade(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    return Verdict(float(len(response) % 2), f"It is {answer}.")


def held_out(split: str = "test", path: Any = None) -> Dataset:
    return Dataset.from_list([{**row, "id": f"q{i}"} for i, row in enumerate(QUESTIONS[:3])])


TASK = Task("odd", held_out, grade, batch_of(grade, "odd"))


# --------------------------------------------------------------------------------------------------------------- run


class LocalLosses(CreditTrainer):
    """Keeps each pass's loss as this process saw it; their mean over processes is the batch's.

    And how many tokens each generation took here: those of the longest completion; and of which dtypes the parts of a
    loss were, and the loss.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.longest: list[int] = []
        self.dtypes: set[str] = set()

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate_single_turn(*args, **kwargs)
        self.longest.append(max(map(len, generated[0])))
        return generated

    def _student_loss(self, inputs: Any, weights: Any, coef: Any, reference: Any, *args: Any) -> Any:
        parts = (weights, coef, *vars(reference).values())
        self.dtypes |= {str(part.dtype) for part in parts if torch.is_tensor(part) and part.is_floating_point()}
        return super()._student_loss(inputs, weights, coef, reference, *args)

    def _distillation_loss(self, *args: Any) -> torch.Tensor:
        loss = super()._distillation_loss(*args)
        self.dtypes.add(str(loss.dtype))
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


class StopAt(TrainerCallback):
    """Ends a run after a step, as a machine's time limit would after a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class OneCollectiveMore(TrainerCallback):
    """What a forgotten branch does: the first process waits for others that do not come."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1))


def run(folder: str, rank: int, processes: int, port: int, limit: float, options: dict[str, Any]) -> None:
    """Train, and write `facts_<rank>.json` and `weights_<rank>.pt`.

    Args:
        folder: where to.
        rank: of this process.
        processes: how many there are.
        port: a free one.
        limit: seconds until the watchdog ends it.
        options: `wrapper` ("", "ddp", "fsdp2", "zero2" or "zero3"), `lora`, `completions` (of `ROLLOUTS`, or
            "sampled"), `verdicts`, `from_path`, `routed` (a model of experts), `stop_at` a step, `resume`, `evaluate`,
            `engine` (a stand-in for vLLM's, which is sent the weights), `unequal` (the control of the watchdog); all
            others are `CreditConfig`'s.
    """
    out = Path(folder)
    credit_run.begin(out, rank, limit)
    wrapper = options.pop("wrapper", "")
    if processes > 1 or wrapper.startswith("zero"):
        credit_run.join(rank, processes, port)
        if wrapper != "ddp":  # which crashes with it in torch 2.13
            # Every collective is compared with the other processes': kind, order and shape.
            dist.set_debug_level(dist.DebugLevel.DETAIL)
    if wrapper == "fsdp2":
        cpu_fsdp2.install()
    if wrapper.startswith("zero"):
        options["deepspeed"] = ZERO | {"zero_optimization": {"stage": int(wrapper[-1]), **options.pop("zero", {})}}
        do_not_compile()
    if options.pop("engine", False):
        standin_engine.install()
        options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
    stop_at, resume = options.pop("stop_at", None), options.pop("resume", False)
    evaluate, unequal = options.pop("evaluate", False), options.pop("unequal", False)
    made = make_trainer(out, processes, options)
    if evaluate:
        made.add_callback(EvaluationCallback(made, TASK, k=3, eval_steps=2, temperature=1.0, top_p=1.0))
    if stop_at:
        made.add_callback(StopAt(stop_at))
    if unequal:
        made.add_callback(OneCollectiveMore())
    draws = credit_run.kept_draws()
    gathered = largest_gather(made.teacher) if wrapper == "zero3" else []
    made.train(resume_from_checkpoint=get_last_checkpoint(str(out / "run")) if resume else None)
    weights = {name: whole(p) for name, p in made.accelerator.unwrap_model(made.model).named_parameters()}
    reference = getattr(made.teacher, "named_weights", dict)()
    saved = {"weights": weights, "reference": {n: whole(p) for n, p in reference.items()}, "engine": {}}
    if made.use_vllm:
        saved["engine"] = made.vllm_generation.llm.weights
    torch.save(saved, out / f"weights_{rank}.pt")
    held = {"reference_held": credit_run.share_held(reference.values()), "gathered": max(gathered, default=0)}
    (out / f"facts_{rank}.json").write_text(json.dumps(facts(made) | held | {"draws": draws}))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def do_not_compile() -> None:
    """On a CPU DeepSpeed compiles a collective for shared memory when it starts, which takes minutes; gloo has one."""
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def make_trainer(out: Path, processes: int, options: dict[str, Any]) -> LocalLosses:
    """Sixteen rollouts a generation batch unless said otherwise, however many processes share them."""
    tokenizer = tiny.build_tokenizer()
    lora, completions = options.pop("lora", False), options.pop("completions", "hashed")
    verdicts = VERDICTS[options.pop("verdicts", "some")]
    batch = options.pop("batch", 16)
    model = routed_model(tokenizer) if options.pop("routed", False) else tiny.build_model(tokenizer)
    if options.pop("from_path", False):  # ZeRO-3 partitions such a model while it is loaded
        model.save_pretrained(out / "model")
        model = str(out / "model")
    config = CreditConfig(
        **{
            "output_dir": str(out / "run"),
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": batch // processes,
            "num_generations": GROUP,
            "max_completion_length": 12,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "seed": 3,
            "contrastive_count": 2,
            "contrastive_coef": 0.3,
            "teacher_update_rate": 0.2,
            "scoring_batch_tokens": 512,  # several passes
            "ddp_find_unused_parameters": False,
            **options,
        }
    )
    torch.manual_seed(0)
    return LocalLosses(
        model,
        verdicts,
        config,
        Dataset.from_list(QUESTIONS),
        processing_class=tokenizer,
        rollout_func=ROLLOUTS.get(completions),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if lora else None,
    )


def facts(made: LocalLosses) -> dict[str, Any]:
    """What the test asserts about one process."""
    accelerator = made.accelerator
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    return {
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "dtype": str(made.accelerator.unwrap_model(made.model).dtype),
        "wrapper": type(made.model_wrapped).__name__,
        "zero_stage": getattr(accelerator.state.deepspeed_plugin, "zero_stage", None),
        "sharded": any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in made.model.parameters()),
        "parameters": sum(full_shape(p).numel() for p in made.model.parameters()),
        "groups": fsdp_groups(made.model),
        "reference_groups": fsdp_groups(getattr(made.teacher, "model", made.model)),
        "reference_computes_in": computing_dtype(made.teacher),
        "buffers_differ": differing_buffers(made),
        "collectives": group._get_sequence_number_for_group() if group else 0,
        "losses": made.losses,
        "longest": made.longest,
        "dtypes": sorted(made.dtypes),
        "alarms": sorted(made.alarms.raised),
        "synchronised": made.vllm_generation.llm.times if made.use_vllm else 0,
        "step": made.state.global_step,
        "log": [entry for entry in made.state.log_history if "loss" in entry],
        "evaluations": [entry for entry in made.state.log_history if "eval_avg@3" in entry],
    }


def fsdp_groups(model: torch.nn.Module) -> list[str]:
    """The modules that FSDP2 gathers one after the other."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def computing_dtype(reference: Teacher) -> str:
    """What a matrix product of the reference's weights is computed in."""
    with reference.autocast():
        weight = torch.ones(2, 2, dtype=next(iter(getattr(reference, "model", reference.student).parameters())).dtype)
        return str((weight @ weight).dtype)


def differing_buffers(made: LocalLosses) -> list[str]:
    """Buffers of the reference that are not the student's."""
    own = dict(made.accelerator.unwrap_model(made.model).named_buffers())
    copied = made.accelerator.unwrap_model(getattr(made.teacher, "model", made.model)).named_buffers()
    return [name for name, buffer in copied if not torch.equal(buffer.float(), own[name].float())]


def routed_model(tokenizer: Any) -> PreTrainedModel:
    """A mixture of experts, with buffers that decide which of them a token goes to."""
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0}
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.randn_like(buffer))
    return model


def largest_gather(reference: Teacher) -> list[int]:
    """Where it is noted, from now on, how many elements ZeRO-3 has made whole whenever the average is updated."""
    zero, update, noted, open_now = import_module("deepspeed.runtime.zero"), reference.update, [], []

    class Noted(zero.GatheredParameters):
        def __enter__(self) -> Any:
            open_now.append(sum(p.ds_numel for p in self.params))
            noted.append(sum(open_now))
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            open_now.pop()
            return super().__exit__(*error)

    def watched(rate: float) -> None:
        original, zero.GatheredParameters = zero.GatheredParameters, Noted
        try:
            update(rate)
        finally:
            zero.GatheredParameters = original

    reference.update = watched
    return noted


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter, gathered where it is sharded."""
    if hasattr(parameter, "ds_tensor"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
