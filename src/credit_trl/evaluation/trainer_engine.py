"""Sampling engine on a trainer's policy, for evaluation during training.

It generates as the trainer does, with vLLM or with the policy unwrapped as in TRL, but with the evaluation's sampling
settings. In a distributed run each process generates a share of the requests.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl.models.utils import unwrap_model_for_generation

from credit_trl.evaluation.config import SamplingConfig
from credit_trl.evaluation.engines import Request, TransformersEngine
from credit_trl.evaluation.generation import Response
from credit_trl.rollout.vllm import seeded
from credit_trl.teacher.models import eval_mode
from credit_trl.teacher.sharding import reshard


class TrainerEngine(TransformersEngine):
    """An [`Engine`] on a `CreditTrainer` or `GRPOTrainer`. All processes must call it together.

    `batch_size` is that of one process, by default `per_device_eval_batch_size`.
    """

    def __init__(self, trainer: Any, *, batch_size: int | None = None) -> None:
        if trainer.tools or getattr(trainer, "environment_factories", None):
            raise ValueError(
                "avg@k samples one completion per prompt, without tools or environments. Evaluate this trainer with "
                "TRL's own `eval_strategy` and `eval_dataset`."
            )
        self.trainer = trainer
        self.processes = trainer.accelerator.num_processes
        self.is_main = trainer.accelerator.is_main_process
        template = {} if trainer.chat_template is None else {"chat_template": trainer.chat_template}
        super().__init__(
            trainer.accelerator.unwrap_model(trainer.model),
            getattr(trainer.processing_class, "tokenizer", trainer.processing_class),
            batch_size=(batch_size or trainer.args.per_device_eval_batch_size) * self.processes,
            chat_template_kwargs={**template, **trainer.chat_template_kwargs},
            name=getattr(trainer.model, "name_or_path", ""),
        )

    def identity(self) -> str:
        """Fingerprint of the weights, from the shards of all processes."""
        self.model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        reshard(self.model)
        fingerprints = gather_object([super().identity()])
        return hashlib.sha256("".join(sorted(set(fingerprints))).encode()).hexdigest()[:16]

    @contextmanager
    def session(self, sampling: SamplingConfig) -> Iterator[None]:
        trainer = self.trainer
        with eval_mode(trainer.model), self._vllm_session(sampling) if trainer.use_vllm else self._policy_session():
            yield

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Response]:
        """All responses, on every process. The last request is repeated so that all shares have the same size."""
        share = -(-len(requests) // self.processes)
        padded = [*requests, *[requests[-1]] * (share * self.processes - len(requests))]
        first = self.trainer.accelerator.process_index * share
        return gather_object(super().generate(padded[first : first + share], sampling))[: len(requests)]

    def sample(self, prompt_ids: list[list[int]], seeds: list[int], sampling: SamplingConfig) -> list[list[int]]:
        if not self.trainer.use_vllm:
            return super().sample(prompt_ids, seeds, sampling)
        generation = self.trainer.vllm_generation
        context = nullcontext()  # a vLLM server uses its own random streams
        if generation.mode != "server":
            group = len(seeds) * generation.tensor_parallel_size  # requests of a colocated engine
            first = self.trainer.accelerator.process_index * len(seeds) // group * group
            context = seeded(generation, gather_object(seeds)[first : first + group])
        with context:
            return generation.generate(prompts=prompt_ids, images=None, num_generations=1)[1]

    def share(self, value: Any) -> Any:
        if self.processes == 1:
            return value
        held = [value]
        broadcast_object_list(held, from_process=0)
        return held[0]

    @contextmanager
    def _policy_session(self) -> Iterator[None]:
        trainer = self.trainer
        options = {"gather_deepspeed3_params": trainer.args.ds3_gather_for_generation}
        if "gradient_checkpointing_kwargs" in inspect.signature(unwrap_model_for_generation).parameters:  # TRL 1.16
            options["gradient_checkpointing_kwargs"] = trainer.args.gradient_checkpointing_kwargs
        with (
            unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, **options) as policy,
            torch.no_grad(),
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        ):
            self.model = policy
            yield

    @contextmanager
    def _vllm_session(self, sampling: SamplingConfig) -> Iterator[None]:
        """Load the current weights into vLLM and replace the rollout's sampling settings."""
        trainer, generation = self.trainer, self.trainer.vllm_generation
        if trainer.state.global_step != trainer._last_loaded_step:
            generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        shared = ("temperature", "top_p", "top_k", "max_completion_length")
        settings = {name: getattr(sampling, name) for name in shared}
        settings |= {"min_p": None, "repetition_penalty": 1.0, "generation_kwargs": {}}
        kept = {name: getattr(generation, name) for name in settings}
        vars(generation).update(settings)
        try:
            with _forked_random_state():
                yield
        finally:
            vars(generation).update(kept)


def _forked_random_state() -> AbstractContextManager[None]:
    """Restore torch's random state afterwards: a colocated engine draws from it even with seeded requests."""
    if not torch.accelerator.is_available():
        return torch.random.fork_rng(devices=[])
    device = torch.accelerator.current_accelerator()
    return torch.random.fork_rng(devices=[torch.accelerator.current_device_index()], device_type=device.type)
