"""Tiny random models, a tokenizer with a chat template, and a verifier that random models can satisfy."""

import hashlib
import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from credit_trl import Verdict
from credit_trl.contexts.tokens import TokenContexts
from tables import tables_of

torch.set_num_threads(1)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TABLES = tables_of(__file__)
# Options of a run on a CPU that writes nothing, and of one short step, for scripts and blocks of the documentation.
QUIET, SMALL = TABLES["quiet"], TABLES["quiet"] | TABLES["small"]


def build_tokenizer(
    merges: Sequence[tuple[str, str]] = (), special: Sequence[str] = ("<|im_start|>",)
) -> PreTrainedTokenizerFast:
    """Byte-level: one token a byte and for each of `merges`, and ChatML's special tokens."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **ends, extra_special_tokens=list(special))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.padding_side = "left"
    return tokenizer


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides
) -> Qwen3ForCausalLM:
    """The same random Qwen3 every time it is called with the same arguments."""
    torch.manual_seed(seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3Config(**{"vocab_size": len(tokenizer), **TABLES["sizes"], **ids, **overrides})
    return Qwen3ForCausalLM(config).to(dtype)


def save_model(path: Path, chat_template: str = CHAT_TEMPLATE, **overrides) -> str:
    """A random Qwen3 and its tokenizer on disk, as a user has them; positions for a page of text. Returns the path."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = chat_template
    build_model(tokenizer, **{"max_position_embeddings": 32768, **overrides}).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def file_hashes(folder: Path) -> dict[str, str]:
    """Hash of each file below a folder, target of each link, and "" for each folder, by path."""
    contents: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            contents[name] = str(path.readlink())
        elif path.is_dir():
            contents[name] = ""
        else:
            contents[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return contents


def context_ids(contexts: TokenContexts) -> list[list[int]] | None:
    """Ids of the teacher's prompt and of each contrast prompt; None without a teacher."""
    return [ids for ids, _ in contexts.sequences()] or None


def context_columns(contexts: TokenContexts) -> list[list[int] | None]:
    """Columns of the teacher's prompt and of each contrast prompt."""
    return [columns for _, columns in contexts.sequences()]


def length_verdicts(completions, answer, **kwargs) -> list[Verdict]:
    """A verifier that random models can satisfy: reward by the first byte, feedback always."""
    return [
        Verdict(float(len(c[-1]["content"]) % 2), f"The answer is {a}.")
        for c, a in zip(completions, answer, strict=True)
    ]
