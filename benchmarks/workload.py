"""Random models and batches of a given shape, and a description of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Workload:
    """Shape of one update: a Qwen3 with random weights, B completions of T tokens, and options of the loss.

    With a `spread` σ, lengths of completions are lognormal with the mean given, and capped at four times the mean;
    those of prompts have half the spread. `padding` is that of this project: "kept" (TRL's batches), "trimmed", or
    "packed", student and teacher. Each prompt has `group` rollouts, whose teacher prompts begin with `common` tokens;
    contrast prompts begin with those of other groups and end with the sample's own feedback.
    """

    vocabulary: int = 151_936
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    tied: bool = False
    batch: int = 2
    completion: int = 512
    prompt: int = 32
    teacher_prompt: int = 96
    topk: int = 100
    tail: str = "bucket"
    contrasts: int = 1
    checkpointing: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    micro_batches: int = 1
    spread: float = 0.0
    padding: str = "trimmed"
    group: int = 1
    common: int = 0

    def with_(self, **changes: object) -> Workload:
        return replace(self, **changes)

    def make_model(self) -> Qwen3ForCausalLM:
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=self.tied,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            return Qwen3ForCausalLM(config).to(getattr(torch, self.dtype))

    def rollouts(self) -> dict[str, Tensor]:
        """Prompts and completions of random tokens, padded as by TRL to the longest of the batch."""
        prompts = self.lengths(self.prompt, self.spread / 2, 11)
        completions = self.lengths(self.completion, self.spread, 12)
        prompt_ids, completion_ids = self._ids(max(prompts), 1)[self._prompt_of(0)], self._ids(max(completions), 2)
        mask = (
            torch.arange(max(completions), device=self.device) < torch.tensor(completions, device=self.device)[:, None]
        )
        flipped = torch.arange(max(prompts), device=self.device) < torch.tensor(prompts, device=self.device)[:, None]
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": flipped.flip(1).long(),
            "completion_ids": completion_ids,
            "completion_mask": mask.long(),
        }

    def lengths(self, mean: int, spread: float, seed: int) -> list[int]:
        """Lengths of the B samples: evenly spaced quantiles of the distribution, in random order."""
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(seed))
        quantiles = torch.special.ndtri((order + 0.5) / self.batch) * spread - spread**2 / 2
        return (mean * quantiles.exp()).round().clamp(2, 4 * mean).int().tolist()

    def contexts(self) -> list[list[list[int]]]:
        """Token ids of the teacher prompt and of C contrast prompts of each completion, all of one length."""
        ids = [self._ids(self.teacher_prompt, 3 + k) for k in range(1 + self.contrasts)]
        if self.common:
            beginnings, feedback = ids[0][:, : self.common], ids[0][:, self.common :]
            ids = [torch.cat([beginnings[self._prompt_of(k)], feedback], dim=1) for k in range(len(ids))]
        return [list(of_sample) for of_sample in zip(*(of.tolist() for of in ids), strict=True)]

    def _prompt_of(self, k: int) -> Tensor:
        """Index of the first sample of the group k places after each sample's own."""
        return (torch.arange(self.batch) // self.group + k) * self.group % self.batch

    def _ids(self, length: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, self.vocabulary, (self.batch, length), generator=generator)
        return ids.to(self.device)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with one token per byte. Larger ids have no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0, "<|im_end|>": 1, "<|im_start|>": 2, **{c: i + 3 for i, c in enumerate(alphabet)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def provenance() -> dict[str, object]:
    """Machine, library versions and commit."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "machine": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "cuda": torch.version.cuda,
            "load_average": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "trl", "transformers", "credit-trl")},
        },
        "commit": commit or "unknown",
    }
