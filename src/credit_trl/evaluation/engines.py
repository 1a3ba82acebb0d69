"""Sampling engines for evaluation: a transformers model, an offline vLLM engine, or the policy of a trainer.

Every sample has a seed of its own, so it does not depend on its batch and an interrupted evaluation continues
with the same samples.
"""

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from credit_trl.contexts.images import ImageReader
from credit_trl.contexts.prompts import chat_renderer, images_of
from credit_trl.evaluation.config import SamplingConfig
from credit_trl.evaluation.generation import Response, end_of_turn_ids, generate_ids, read_responses
from credit_trl.quickstart_model import model_path, naming_model
from credit_trl.rollout.batch import Prompt
from credit_trl.rollout.thinking import thinking_marks
from credit_trl.teacher.models import eval_mode
from credit_trl.teacher.sharding import local_part, reshard
from credit_trl.trl_compat import VLLMGeneration, unwrap_model_for_generation

Ids = list[list[int]]  # of each prompt or completion
Images = Sequence[Sequence[Any]]  # of each prompt; empty where none has any
TemplateKwargs = Mapping[str, Any] | None  # arguments of the chat template


class Engine:
    """Interface between `evaluate` and a model. In a distributed run all processes call it together.

    A subclass has `identity()`, a fingerprint of the weights with which alone an evaluation continues, and
    `sample(prompt_ids, seeds, sampling)`, which returns the token ids of one completion per prompt, and takes `images`
    where some have any.

    Args:
        name: name of the model in results.
        tokenizer: its tokenizer or processor, with a chat template if prompts are conversations.
        batch_size: samples per call of `generate`; an interruption loses at most one batch.
        chat_template_kwargs: such as `{"enable_thinking": False}`.

    Attributes:
        is_main: whether this process grades samples and writes files.
        expands_images: whether prompts are encoded with all tokens of their images.
        eos_token_ids: ids that end a completion.
    """

    is_main = True
    expands_images = True
    eos_token_ids: Sequence[int] = ()

    def __init__(self, name: str, tokenizer: Any, batch_size: int, chat_template_kwargs: TemplateKwargs) -> None:
        self.name = name
        self.processor = tokenizer
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.reader = ImageReader(tokenizer)
        self.batch_size = batch_size
        self.chat_template_kwargs = dict(chat_template_kwargs or {})

    def session(self, sampling: SamplingConfig) -> AbstractContextManager[None]:
        """Context manager around all calls of `generate`."""
        return nullcontext()

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig) -> list[Response]:
        """One response per prompt, in order; `seeds`, in [0, 2**63), are those of the samples' random streams."""
        self.reader.clear()
        options = {"reader": self.reader, "expands": self.expands_images, **self.chat_template_kwargs}
        prompt_ids = [encode_prompt(self.processor, prompt, **options) for prompt in prompts]
        images = list(map(images_of, prompts))
        image_inputs = {"images": images} if any(images) else {}
        ids = self.sample(prompt_ids, list(seeds), sampling, **image_inputs)
        marks = thinking_marks(self.processor, self.chat_template_kwargs.get("chat_template"))
        return read_responses(self.tokenizer, prompts, prompt_ids, ids, self.eos_token_ids, marks)

    def share(self, value: Any) -> Any:
        """Broadcast the main process's value."""
        return value


class TransformersEngine(Engine):
    """Samples with `model.generate`. The name in results is the path or hub name that the model was loaded from."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "",
        batch_size: int = 32,
        chat_template_kwargs: TemplateKwargs = None,
    ) -> None:
        name = name or getattr(model, "name_or_path", "") or type(model).__name__
        super().__init__(name, tokenizer, batch_size, chat_template_kwargs)
        self.eos_token_ids = end_of_turn_ids(model, self.tokenizer)
        self.model = model

    @classmethod
    def from_pretrained(cls, name: str, *, batch_size: int = 32, chat_template_kwargs: TemplateKwargs = None) -> Self:
        """Load a model and its processor or tokenizer by name or directory, onto the accelerator if there is one."""
        path = model_path(name)
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        with naming_model(name):
            processor = AutoProcessor.from_pretrained(path)  # the tokenizer of a model without images
            reads_images = hasattr(processor, "image_processor")
            auto = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
            model = auto.from_pretrained(path, dtype="auto").to(device)
        return cls(model, processor, name=name, batch_size=batch_size, chat_template_kwargs=chat_template_kwargs)

    def identity(self) -> str:
        return weight_fingerprint(self.model)

    def session(self, sampling: SamplingConfig) -> AbstractContextManager[None]:
        return eval_mode(self.model)

    def sample(self, prompt_ids: Ids, seeds: list[int], sampling: SamplingConfig, images: Images = ()) -> Ids:
        inputs = [self.reader.read(sample_images) for sample_images in images]
        return generate_ids(self.model, prompt_ids, sampling, self.eos_token_ids, seeds=seeds, images=inputs)


class VLLMEngine(Engine):
    """Samples with an offline `vllm.LLM`, which schedules requests itself, so that a large batch size is good."""

    expands_images = False  # vLLM does

    def __init__(
        self, name: str, *, batch_size: int = 512, chat_template_kwargs: TemplateKwargs = None, **options: Any
    ) -> None:
        """Start the engine of a model by name or directory with other `options` of `vllm.LLM`."""
        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError("`engine='vllm'` needs vLLM: pip install vllm, or use transformers.") from error
        path = model_path(name)
        try:
            self.llm = LLM(model=path, **options)
        except TypeError as error:
            raise TypeError(f"`engine_options` are not those of `vllm.LLM`: {error}") from error
        reads_images = self.llm.model_config.is_multimodal_model
        tokenizer = AutoProcessor.from_pretrained(path) if reads_images else self.llm.get_tokenizer()
        super().__init__(name, tokenizer, batch_size, chat_template_kwargs)

    def identity(self) -> str:
        """The model's name, with sizes and times of the weight files of a folder."""
        identity = f"vllm:{self.name}"
        for path in sorted(Path(model_path(self.name)).glob("*.safetensors")):
            identity += f" {path.stat().st_size}:{path.stat().st_mtime_ns}"
        return identity

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig) -> list[Response]:
        self._ended: list[bool] = []
        responses = super().generate(prompts, seeds, sampling)
        for i, has_ended in enumerate(self._ended):
            responses[i] = replace(responses[i], truncated=not has_ended)
        return responses

    def sample(self, prompt_ids: Ids, seeds: list[int], sampling: SamplingConfig, images: Images = ()) -> Ids:
        from vllm import SamplingParams

        options = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
        options["max_tokens"] = sampling.max_completion_length
        parameters = [SamplingParams(n=1, seed=seed, **options) for seed in seeds]
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in prompt_ids]
        for prompt, prompt_images in zip(inputs, images, strict=False):
            prompt |= {"multi_modal_data": {"image": prompt_images}} if prompt_images else {}
        outputs = self.llm.generate(inputs, sampling_params=parameters, use_tqdm=False)
        self._ended = [output.outputs[0].finish_reason != "length" for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs]


class TrainerEngine(TransformersEngine):
    """Samples as a `CreditTrainer` or `GRPOTrainer` does, with vLLM or with its policy, but with other settings.

    Each process generates a share of the samples; all must call it together. `batch_size` is that of one process, by
    default `per_device_eval_batch_size`.
    """

    def __init__(self, trainer: Any, *, batch_size: int | None = None) -> None:
        if trainer.tools or getattr(trainer, "environment_factories", None):
            raise ValueError("avg@k has no tools or environments. Set TRL's `eval_strategy` and `eval_dataset`.")
        self.trainer = trainer
        self.expands_images = not trainer.use_vllm or trainer.vllm_generation.mode == "server"
        self.processes = trainer.accelerator.num_processes
        self.is_main = trainer.accelerator.is_main_process
        template = {} if trainer.chat_template is None else {"chat_template": trainer.chat_template}
        super().__init__(
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.processing_class,
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

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig) -> list[Response]:
        """All responses, on every process. The last sample is repeated so that all shares have the same size."""
        share = -(-len(prompts) // self.processes)
        start = self.trainer.accelerator.process_index * share
        local = slice(start, start + share)
        padded_prompts = [*prompts, *[prompts[-1]] * self.processes]
        padded_seeds = [*seeds, *[seeds[-1]] * self.processes]
        responses = super().generate(padded_prompts[local], padded_seeds[local], sampling)
        return gather_object(responses)[: len(prompts)]

    def sample(self, prompt_ids: Ids, seeds: list[int], sampling: SamplingConfig, images: Images = ()) -> Ids:
        if not self.trainer.use_vllm:
            return super().sample(prompt_ids, seeds, sampling, images)
        generation = self.trainer.vllm_generation
        context = nullcontext()  # a vLLM server uses its own random streams
        if generation.mode != "server":
            group = len(seeds) * generation.tensor_parallel_size  # requests of a colocated engine
            start = self.trainer.accelerator.process_index * len(seeds) // group * group
            context = seeded(generation, gather_object(seeds)[start : start + group])
        with context:
            shown_images = [prompt_images or None for prompt_images in images] or None
            return generation.generate(prompts=prompt_ids, images=shown_images, num_generations=1)[1]

    def share(self, value: Any) -> Any:
        return broadcast_object_list([value])[0]

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
        generation.sync_weights()  # at any step: the best model may have been loaded
        trainer._last_loaded_step = trainer.state.global_step
        shared = ("temperature", "top_p", "top_k", "max_completion_length")
        settings = {name: getattr(sampling, name) for name in shared}
        settings |= {"min_p": None, "repetition_penalty": 1.0, "generation_kwargs": {}}
        settings_of_training = {name: getattr(generation, name) for name in settings}
        device = torch.accelerator.current_accelerator(check_available=True)
        devices = [] if device is None else [torch.accelerator.current_device_index()]
        vars(generation).update(settings)
        try:  # a colocated engine draws from torch's random state even with seeded requests
            with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
                yield
        finally:
            vars(generation).update(settings_of_training)


def encode_prompt(
    processor: Any, prompt: Prompt, *, reader: ImageReader | None = None, expands: bool = True, **options: Any
) -> list[int]:
    """Token ids of a prompt; a conversation goes through the chat template, with the generation prompt.

    Args:
        processor: tokenizer, or processor of a multimodal model.
        reader: of the processor, to read images once.
        expands: False leaves one placeholder for each image.
        **options: `chat_template_kwargs`, and `chat_template`.

    Raises:
        ValueError: the prompt has images, and there is only a tokenizer.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if tokenizer is not processor:
        text = chat_renderer(processor, is_multimodal=True, **options)(prompt)
        return (reader or ImageReader(processor)).encode(text, images_of(prompt) if expands else ())
    if images_of(prompt):
        raise ValueError("A prompt has images, and there is only a tokenizer. Pass the processor of the model.")
    return tokenizer(chat_renderer(tokenizer, **options)(prompt), add_special_tokens=False)["input_ids"]


@contextmanager
def seeded(generation: VLLMGeneration, seeds: Sequence[int]) -> Iterator[None]:
    """Make a colocated engine sample each completion with its own seed inside the block.

    `seeds` has one per prompt of the processes that share the engine, in the order of their ranks.
    """
    engine = generation.llm
    generate = engine.generate

    def seeded_generate(prompts: Sequence[Any], sampling_params: Any, **options: Any) -> Any:
        parameters = [sampling_params.clone() for _ in prompts]
        for sampling, seed in zip(parameters, seeds, strict=True):
            sampling.seed = seed
        return generate(prompts, sampling_params=parameters, **options)

    engine.generate = seeded_generate
    try:
        yield
    finally:
        engine.generate = generate


@torch.no_grad()
def weight_fingerprint(model: torch.nn.Module) -> str:
    """16 hex digits that change with the weights of this process: a hash of each parameter's sum and norm."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights = local_part(parameter)
        flat = weights.detach().flatten()
        flat = flat if flat.is_floating_point() else flat.float()  # 4-bit weights are packed in bytes
        precise = torch.float32 if flat.device.type == "mps" else torch.float64
        sums = (flat.sum(dtype=precise), torch.linalg.vector_norm(flat, dtype=precise))
        digest.update(f"{name} {tuple(weights.shape)} {[value.item().hex() for value in sums]}\n".encode())
    return digest.hexdigest()[:16]
