"""Tokenizer and randomly initialized model of an embedded base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from credit_trl.tasks.quickstart import CITIES, LETTERS, SHORTCUT_THOUGHT, TOPIC_OF, TOPICS, tool

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT_LENGTH = 512

# One merge per word and a few for the template. The alphabet is byte-level, so any other text encodes too.
_VOCABULARY_SIZE = 800

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(template_texts: list[str]) -> PreTrainedTokenizerFast:
    """Tokenizer of the embedded task, in which each cue, topic and city is one token.

    Args:
        template_texts: further texts of the contexts, such as the teacher's templates and the feedback.

    Raises:
        RuntimeError: a word of the task takes more than one token.
    """
    words = [f" {word}" for word in (*TOPIC_OF, *TOPICS, *CITIES, *LETTERS)] + list(CITIES)
    return train_tokenizer(_corpus(template_texts), words)


def train_tokenizer(corpus: Iterable[str], words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE tokenizer with a ChatML template and a small vocabulary.

    Args:
        corpus: texts whose word counts decide the merges.
        words: words that must be one token each, with their leading space where they have one.

    Raises:
        RuntimeError: one of the words takes more than one token.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens=[TURN_START],
        padding_side="left",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    if split := [word for word in words if len(tokenizer.encode(word)) != 1]:
        raise RuntimeError(f"The vocabulary of {_VOCABULARY_SIZE} splits {split}: raise _VOCABULARY_SIZE.")
    return tokenizer


def _corpus(template_texts: list[str]) -> Iterator[str]:
    """Training texts of the tokenizer: the templates most often, then every word of the task equally often."""
    templates = ["system", "user", "assistant", "Tools: A B C D", f"Thought: {SHORTCUT_THOUGHT}", *template_texts]
    yield from templates * 300
    for topic in TOPICS:
        yield from [f"about {topic}.\nAction: {tool(topic)}\n"] * 60
    for cue in TOPIC_OF:
        yield from [f"Help me with {cue} for"] * 20 + [f"Thought: {cue} is about"] * 20
    for city in CITIES:
        yield from [f" for {city}."] * 20 + [f'Action Input: {{"city": "{city}"}}'] * 20


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, layers: int = 3, width: int = 96) -> Qwen3ForCausalLM:
    """Qwen3 with random fp32 parameters, 0.45 million by default, on the CPU.

    The rotary base is 100 instead of Qwen's 1e6: contexts have about 200 tokens, and with slower rotations a model of
    this size does not learn to look a letter up in its prompt.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
