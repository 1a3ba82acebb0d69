"""One process of a small deterministic run, forked from a server that has imported all modules.

`options` select the wrapper and uneven batches. Each process writes its wrapper, losses and number of collectives.
"""

import faulthandler
import hashlib
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import rounding  # noqa: F401, registers a quantizer
import tiny
from credit_trl import CreditConfig, CreditTrainer, Verdict
from credit_trl.contexts import gather
from credit_trl.evaluation import EvaluationCallback
from credit_trl.lab.analysis import CreditMapCallback
from credit_trl.lab.report import ReportCallback
from credit_trl.rollout.batch import prompt_key
from credit_trl.tasks.registry import Task, batch_of
from credit_trl.teacher.external import ModelTeacher
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.sharding import full_shape, wrapping
from credit_trl.training import step
from distributed import cpu_fsdp2, standin_engine

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from padded import padding_kept

GROUP = 4
QUESTIONS = [
    {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a in range(4) for b in range(5)
]
QUESTIONS[3] = QUESTIONS[9]  # a duplicate, which must not be a contrast prompt
AUTOMATIC = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
ZERO = {"zero_allow_untested_optimizer": True} | dict.fromkeys(AUTOMATIC, "auto")


def deterministic_rollouts(prompts, trainer):
    """Completions of 1 to 9 bytes that depend only on the prompt and the index in its group."""
    tokenizer = trainer.processing_class
    start = trainer.accelerator.process_index * len(prompts)
    prompt_ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
    completion_ids = []
    for i, prompt in enumerate(prompts):
        digest = hashlib.sha256(f"{prompt}{(start + i) % GROUP}".encode()).hexdigest()
        text = digest[: int(digest[0], 16) % 9 + 1]
        completion_ids.append(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def some_verdicts(completions, answer, **kwargs):
    """Verdicts without success and feedback for some prompts, whose samples have no teacher."""
    graded = []
    for completion, a in zip(completions, answer, strict=True):
        is_hopeless = int(a) % 3 == 0
        reward = 0.0 if is_hopeless else float(completion[-1]["content"] > "8")
        graded.append(Verdict(reward, None if is_hopeless else f"It is {a}."))
    return graded


def one_token(prompts, trainer):
    """Completions of a single EOS token."""
    generated = deterministic_rollouts(prompts, trainer)
    generated["completion_ids"] = [[trainer.processing_class.eos_token_id] for _ in prompts]
    return generated


def never_ending(prompts, trainer):
    """Completions that are all truncated at the limit."""
    generated = deterministic_rollouts(prompts, trainer)
    limit, filler = trainer.args.max_completion_length, trainer.processing_class("7")["input_ids"]
    generated["completion_ids"] = [(ids[:-1] + filler * limit)[:limit] for ids in generated["completion_ids"]]
    return generated


def silent_second_half(completions, answer, trainer_state=None, **kwargs):
    """Neither success nor feedback on any process but the first, so no sample there has a teacher."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return [Verdict(0.0) for _ in completions]
    return some_verdicts(completions, answer)


def feedback_on_second_process(completions, answer, trainer_state=None, **kwargs):
    """Success without feedback on the first process; on the others feedback, also on a turn that does not exist."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        return [Verdict(float(i % GROUP == 0)) for i, _ in enumerate(completions)]
    return [Verdict(0.0, "no", turn_feedback={9: "ignored"}) for _ in completions]


ROLLOUTS = {"hashed": deterministic_rollouts, "one token": one_token, "truncated": never_ending}
VERDICTS = {
    "some": some_verdicts,
    "first process only": silent_second_half,
    "feedback on the second process": feedback_on_second_process,
}


def grade(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    return Verdict(float(len(response) % 2), f"It is {answer}.")


def held_out(split: str = "test", path: Any = None) -> Dataset:
    return Dataset.from_list([{**row, "id": f"q{i}"} for i, row in enumerate(QUESTIONS[:3])])


TASK = Task("odd", held_out, grade, batch_of(grade, "odd"))


def kept_draws() -> list[tuple[int, list[str]]]:
    """Return a list that gets (sample, prompts drawn for it) of each later draw."""
    draws, draw = [], gather.draw_contrasts

    def record(source, batch, sample, seed):
        keys = []
        draws.append((sample, keys))
        for contrast in draw(source, batch, sample, seed):
            keys.append(prompt_key(contrast.prompt))
            yield contrast

    gather.draw_contrasts = record
    return draws


def share_held(parameters) -> float:
    """Share of the parameters' elements on this process; 0 without parameters."""
    local_numel = total = 0
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor"):
            local_numel, total = local_numel + parameter.ds_tensor.numel(), total + parameter.ds_numel
        else:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local_numel, total = local_numel + local.numel(), total + parameter.numel()
    return local_numel / max(total, 1)


class LocalLosses(CreditTrainer):
    """Records this process's losses, longest completions and dtypes of the loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.longest: list[int] = []
        self.dtypes: set[str] = set()
        self.gradients: list[dict[str, Any]] = []

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate_single_turn(*args, **kwargs)
        self.longest.append(max(map(len, generated[0])))
        return generated

    def _distillation_loss(self, *args: Any) -> torch.Tensor:
        credit_loss = step.credit_loss

        def record(hidden: Any, head: Any, tokens: Any, scores: Any, *options: Any) -> Any:
            parts = [*tokens, *scores]
            self.dtypes |= {str(part.dtype) for part in parts if torch.is_tensor(part) and part.is_floating_point()}
            return credit_loss(hidden, head, tokens, scores, *options)

        with patch.object(step, "credit_loss", record):
            loss = super()._distillation_loss(*args)
        self.dtypes.add(str(loss.dtype))
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        reduce, reduced = dist.reduce_scatter_single, []

        def record(**kwargs: Any) -> Any:
            reduced.append(str(kwargs["input"].dtype))
            return reduce(**kwargs)

        with patch.object(dist, "reduce_scatter_single", record):
            loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        self.gradients.append(gradients(self.model, reduced))
        return loss


def gradients(model: torch.nn.Module, reduced: list[str]) -> dict[str, Any]:
    """Gradients after a micro-batch: dtypes, share of them on this process, and dtypes of the reductions."""
    present = [p.grad for p in model.parameters() if p.grad is not None]
    unsharded = [
        parameter.unsharded_accumulated_grad
        for module in model.modules()
        if isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group
        for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params
        if parameter.unsharded_accumulated_grad is not None
    ]
    dtypes = sorted({str(gradient.dtype) for gradient in present})
    return {"dtypes": dtypes, "share": share_held(present), "unsharded": len(unsharded), "reduced": reduced}


class StopAt(TrainerCallback):
    """Ends a run after a step, as a time limit does after a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class OneCollectiveMore(TrainerCallback):
    """An extra collective on the first process, which hangs there."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1))


def begin(out: Path, rank: int, limit: float) -> None:
    """Redirect the output to `log_<rank>.txt`, with a traceback after half of the watchdog's limit."""
    output = os.open(out / f"log_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit / 2)


def join(rank: int, processes: int, port: int) -> None:
    """Set the environment variables that a launcher sets."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRL_EXPERIMENTAL_SILENCE": "1"}
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}


def run(folder: str, rank: int, processes: int, port: int, limit: float, options: dict[str, Any]) -> None:
    """Train, and write `facts_<rank>.json` and `weights_<rank>.pt`; `limit` is the watchdog's, in seconds.

    `options` are `wrapper` ("", "ddp", "fsdp2", "zero2" or "zero3"), `lora`, `completions` (of `ROLLOUTS`, or
    "sampled"), `verdicts`, `from_path`, `routed` (experts), `stop_at` a step, `resume`, `evaluate`, `maps`,
    `padded` (TRL's batches and passes), `vocab_size`, `engine` (a stand-in for vLLM's that gets the weights),
    `unequal` (the control of the watchdog), and those of `CreditConfig`.
    """
    out = Path(folder)
    begin(out, rank, limit)
    wrapper = options.pop("wrapper", "")
    if processes > 1 or wrapper.startswith("zero"):
        join(rank, processes, port)
        if wrapper != "ddp":  # DDP crashes with it in torch 2.13
            # torch compares kind, order and shape of each collective between the processes.
            dist.set_debug_level(dist.DebugLevel.DETAIL)
    if wrapper == "fsdp2":
        cpu_fsdp2.install()
    if wrapper.startswith("zero"):
        options["deepspeed"] = ZERO | {"zero_optimization": {"stage": int(wrapper[-1]), **options.pop("zero", {})}}
        # A shared-memory collective, whose compilation takes minutes on a CPU; gloo has one.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    if options.pop("engine", False):
        standin_engine.install()
        options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
    stop_at, resume = options.pop("stop_at", None), options.pop("resume", False)
    if options.pop("padded", False):
        padding_kept()
    evaluate, unequal, maps = (options.pop(name, False) for name in ("evaluate", "unequal", "maps"))
    trainer = make_trainer(out, processes, options)
    if trainer.credit_step is None:
        trainer.teacher = Teacher(trainer.model, trainer.accelerator)  # whose facts are the policy's
    if evaluate:
        trainer.add_callback(EvaluationCallback(trainer, TASK, k=3, eval_steps=2, temperature=1.0, top_p=1.0))
    if stop_at:
        trainer.add_callback(StopAt(stop_at))
    for kind in (CreditMapCallback, ReportCallback):
        trainer.remove_callback(kind)
    if maps:
        trainer.add_callback(CreditMapCallback(trainer, every=2, rollouts=16))
    if unequal:
        trainer.add_callback(OneCollectiveMore())
    draws = kept_draws()
    gathered = largest_gather(trainer.teacher) if wrapper == "zero3" else []
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out / "run")) if resume else None)
    if rank == 0 and wrapper in ("", "ddp"):
        trainer.save_model(str(out / "final"))  # by one process alone, as scripts do
    weights = {name: whole(p) for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}
    teacher = named_weights(trainer.teacher)
    saved = {"weights": weights, "teacher": {n: whole(p) for n, p in teacher.items()}, "engine": {}}
    if trainer.use_vllm:
        saved["engine"] = trainer.vllm_generation.llm.weights
    torch.save(saved, out / f"weights_{rank}.pt")
    teacher_facts = {"teacher_held": share_held(teacher.values()), "gathered": max(gathered, default=0)}
    (out / f"facts_{rank}.json").write_text(json.dumps(facts(trainer) | teacher_facts | {"draws": draws}))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def named_weights(teacher: Teacher) -> dict[str, torch.Tensor]:
    """Weights of a teacher by name; none of a live teacher."""
    if isinstance(teacher, ModelTeacher):
        return dict(teacher.unwrapped(teacher.model).named_parameters())
    return getattr(teacher, "named_weights", dict)()


def make_trainer(out: Path, processes: int, options: dict[str, Any]) -> LocalLosses:
    """Build the trainer, by default with 16 rollouts per generation batch over all processes."""
    tokenizer = tiny.build_tokenizer()
    lora, completions = options.pop("lora", False), options.pop("completions", "hashed")
    verdicts = VERDICTS[options.pop("verdicts", "some")]
    batch = options.pop("batch", 16)
    rows = options.pop("vocab_size", len(tokenizer))
    model = routed_model(tokenizer) if options.pop("routed", False) else tiny.build_model(tokenizer, vocab_size=rows)
    if options.pop("from_path", False):  # ZeRO-3 partitions it during loading
        model.save_pretrained(out / "model")
        model = str(out / "model")
    sizes = {"per_device_train_batch_size": batch // processes, "num_generations": GROUP, "max_completion_length": 12}
    optimizer = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "ddp_find_unused_parameters": False}
    method = {"contrastive_count": 2, "contrastive_coef": 0.3, "teacher_update_rate": 0.2}
    several_passes = {"scoring_batch_tokens": 512, "packed": False}
    defaults = (
        tiny.QUIET | sizes | optimizer | method | several_passes | {"max_steps": 2, "logging_steps": 1, "seed": 3}
    )
    config = CreditConfig(str(out / "run"), **defaults | options)
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if lora else None
    parts = {"processing_class": tokenizer, "rollout_func": ROLLOUTS.get(completions), "peft_config": adapter}
    return LocalLosses(model, verdicts, config, Dataset.from_list(QUESTIONS), **parts)


def facts(trainer: LocalLosses) -> dict[str, Any]:
    """Facts of one process that the tests check."""
    accelerator = trainer.accelerator
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    return {
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "wrapping": wrapping(accelerator.state),
        "dtype": str(trainer.accelerator.unwrap_model(trainer.model).dtype),
        "zero_stage": getattr(accelerator.state.deepspeed_plugin, "zero_stage", None),
        "sharded": any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in trainer.model.parameters()),
        "parameters": sum(full_shape(p).numel() for p in trainer.model.parameters()),
        "groups": fsdp_groups(trainer.model),
        "teacher_groups": fsdp_groups(getattr(trainer.teacher, "model", trainer.model)),
        "teacher_computes_in": computing_dtype(trainer.teacher),
        "buffers_differ": differing_buffers(trainer),
        "collectives": group._get_sequence_number_for_group() if group else 0,
        "losses": trainer.losses,
        "longest": trainer.longest,
        "dtypes": sorted(trainer.dtypes),
        "gradients": trainer.gradients,
        "alarms": sorted(trainer.alarms.raised),
        "synchronised": trainer.vllm_generation.llm.times if trainer.use_vllm else 0,
        "step": trainer.state.global_step,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "evaluations": [entry for entry in trainer.state.log_history if "eval_avg@3" in entry],
    }


def fsdp_groups(model: torch.nn.Module) -> list[str]:
    """Names of the modules that FSDP2 gathers separately."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def computing_dtype(teacher: Teacher) -> str:
    """Dtype in which a matrix product of the teacher's weights is computed."""
    with teacher.autocast():
        weight = torch.ones(2, 2, dtype=next(iter(getattr(teacher, "model", teacher.student).parameters())).dtype)
        return str((weight @ weight).dtype)


def differing_buffers(trainer: LocalLosses) -> list[str]:
    """Names of the teacher's buffers that differ from the student's."""
    policy_buffers = dict(trainer.accelerator.unwrap_model(trainer.model).named_buffers())
    copied = trainer.accelerator.unwrap_model(getattr(trainer.teacher, "model", trainer.model)).named_buffers()
    return [name for name, buffer in copied if not torch.equal(buffer.float(), policy_buffers[name].float())]


def routed_model(tokenizer: Any) -> PreTrainedModel:
    """A mixture of experts whose routing depends on buffers."""
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
    experts |= {"moe_intermediate_size": 16}
    sizes = {"hidden_size": 32, "head_dim": 16, "vocab_size": len(tokenizer)}
    sizes |= {f"num_{name}": 2 for name in ("hidden_layers", "attention_heads", "key_value_heads")}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Glm4MoeConfig(**experts, **sizes, **ids)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.randn_like(buffer))
    return model


def largest_gather(teacher: Teacher) -> list[int]:
    """Return a list that gets the number of gathered elements, at each gathering of ZeRO-3 in an update of the EMA."""
    zero, update, counts, open_now = import_module("deepspeed.runtime.zero"), teacher.update, [], []

    class Counting(zero.GatheredParameters):
        def __enter__(self) -> Any:
            open_now.append(sum(p.ds_numel for p in self.params))
            counts.append(sum(open_now))
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            open_now.pop()
            return super().__exit__(*error)

    def watched(rate: float) -> None:
        with patch.object(zero, "GatheredParameters", Counting):
            update(rate)

    teacher.update = watched
    return counts


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Copy a parameter, gathered if it is sharded."""
    if hasattr(parameter, "ds_tensor"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
