"""Sampling from a trainer's policy in the middle of training, through the trainer's own engine.

Where the trainer generates with vLLM, so does the evaluation, with its own sampling settings; else the policy itself
is unwrapped as TRL does for its rollouts. In a distributed run each process answers its share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl.models.utils import unwrap_model_for_generation

from credit_trl.evaluation.engines import (
    Request,
    Response,
    Sampling,
    encode_prompt,
    end_of_turn_ids,
    generate_ids,
    pad_token_id,
    read_responses,
)
from credit_trl.evaluation.fingerprints import weight_fingerprint
from credit_trl.rollout.vllm import seeded
from credit_trl.teacher.sharding import reshard


class TrainerEngine:
    """An [`Engine`] on a `CreditTrainer` or `GRPOTrainer`. Every process of the run must call it.

    Args:
        trainer: the trainer.
        batch_size: answers that a process generates side by side, by default the evaluation batch size.

    Raises:
        ValueError: the trainer has tools or environments: an answer would be a conversation with them.
    """

    def __init__(self, trainer: Any, *, batch_size: int | None = None) -> None:
        if trainer.tools or getattr(trainer, "environment_factories", None):
            raise ValueError(
                "avg@k samples one answer a prompt, without tools or environments. Evaluate this trainer with "
                "TRL's own `eval_strategy` and `eval_dataset`."
            )
        self.trainer = trainer
        self.tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        self.name = getattr(trainer.model, "name_or_path", "") or type(trainer.model).__name__
        self.processes = trainer.accelerator.num_processes
        self.batch_size = (batch_size or trainer.args.per_device_eval_batch_size) * self.processes
        self.is_main = trainer.accelerator.is_main_process
        self.eos_token_ids = end_of_turn_ids(trainer.accelerator.unwrap_model(trainer.model), self.tokenizer)
        self.chat_template_kwargs = dict(trainer.chat_template_kwargs)
        self._policy: Any = None

    def identity(self) -> str:
        """The fingerprint of the weights, of all processes' shards."""
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        reshard(policy)
        fingerprints = gather_object([weight_fingerprint(policy)])
        return hashlib.sha256("".join(sorted(set(fingerprints))).encode()).hexdigest()[:16]

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[None]:
        trainer = self.trainer
        was_training = trainer.model.training
        trainer.model.eval()
        try:
            with self._vllm_session(sampling) if trainer.use_vllm else self._policy_session():
                yield
        finally:
            trainer.model.train(was_training)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """All answers on every process; each generates a part, and parts are filled up to the same size."""
        share = -(-len(requests) // self.processes)
        filled = [*requests, *[requests[-1]] * (share * self.processes - len(requests))]
        first = self.trainer.accelerator.process_index * share
        mine = filled[first : first + share]
        template = {"chat_template": self.trainer.chat_template, **self.chat_template_kwargs}
        prompts = [encode_prompt(self.tokenizer, request.prompt, **template) for request in mine]
        seeds = [request.seed for request in filled]
        if self.trainer.use_vllm:
            with self._vllm_seeds(seeds, share):
                ids = self.trainer.vllm_generation.generate(prompts=prompts, images=None, num_generations=1)[1]
        else:
            seeds = seeds[first : first + share]
            pad = pad_token_id(self.tokenizer)
            ids = generate_ids(self._policy, prompts, seeds, sampling, self.eos_token_ids, pad_token_id=pad)
        return gather_object(read_responses(self.tokenizer, ids, self.eos_token_ids))[: len(requests)]

    def share(self, value: Any) -> Any:
        if self.processes == 1:
            return value
        held = [value]
        broadcast_object_list(held, from_process=0)
        return held[0]

    def _vllm_seeds(self, seeds: list[int], share: int) -> AbstractContextManager[None]:
        """A stream for each sample, from an engine in this process; a server draws from its own.

        Args:
            seeds: of all processes.
            share: how many of them a process has.
        """
        generation = self.trainer.vllm_generation
        if generation.mode == "server":
            return nullcontext()
        group = share * generation.tensor_parallel_size
        first = self.trainer.accelerator.process_index * share // group * group
        return seeded(generation, seeds[first : first + group])

    @contextmanager
    def _policy_session(self) -> Iterator[None]:
        trainer = self.trainer
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as policy,
            torch.no_grad(),
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        ):
            self._policy = policy
            try:
                yield
            finally:
                self._policy = None

    @contextmanager
    def _vllm_session(self, sampling: Sampling) -> Iterator[None]:
        """vLLM with the current weights, and this evaluation's settings in place of the rollout's."""
        trainer, generation = self.trainer, self.trainer.vllm_generation
        if trainer.state.global_step != trainer._last_loaded_step:
            generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        settings = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": None,
            "repetition_penalty": 1.0,
            "max_completion_length": sampling.max_completion_length,
            "generation_kwargs": {},
        }
        kept = {name: getattr(generation, name) for name in settings}
        vars(generation).update(settings)
        try:
            with _kept_random_state():
                yield
        finally:
            vars(generation).update(kept)


def _kept_random_state() -> AbstractContextManager[None]:
    """An engine in this process may draw from torch's generators, though each request has a seed."""
    if not torch.accelerator.is_available():
        return torch.random.fork_rng(devices=[])
    device = torch.accelerator.current_accelerator()
    return torch.random.fork_rng(devices=[torch.accelerator.current_device_index()], device_type=device.type)
