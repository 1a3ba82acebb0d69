"""Shipped base of the embedded task: tokenizer, template, loading, and bases in the cache directory."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.quickstart_model import SHIPPED, load_model, model_path
from credit_trl.tasks import quickstart
from credit_trl.tasks.quickstart import SHORTCUT_THOUGHT, draw_question


@pytest.fixture(scope="module")
def base():
    return load_model()


@pytest.fixture(scope="module")
def tokenizer(base):
    return base[1]


@given(text=st.text())
def test_tokenizer_round_trips_any_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_prompt_is_a_prefix_of_its_conversation_in_chatml(tokenizer):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    conversation = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "A"}], tokenize=False)
    assert conversation == f"{prompt}A<|im_end|>\n"
    assert (tokenizer.eos_token, tokenizer.padding_side) == ("<|im_end|>", "left")


def test_token_classes_separate_input_words_from_the_template(tokenizer):
    question = draw_question(random.Random(0), "airport")
    ids = [*tokenizer.encode(question.response()), tokenizer.eos_token_id]
    classes = quickstart.token_classes(ids, tokenizer)
    words = {name: tokenizer.decode([i]) for name, i in zip(classes, ids, strict=True) if name != "generic"}
    assert words == {"cue": " airport", "topic": " travel", "tool": " travel", "city": question.city}
    assert Counter(classes) == {"generic": 20, "cue": 1, "topic": 1, "tool": 1, "city": 1}
    shortcut = quickstart.token_classes(tokenizer.encode(question.response(SHORTCUT_THOUGHT)), tokenizer)
    assert {"tool", "city"} < set(shortcut)
    assert not {"cue", "topic"} & set(shortcut)


def test_shipped_base_is_small_tied_and_in_fp32(base):
    model, tokenizer = base
    assert model.dtype == torch.float32
    assert not model.training
    assert 0.40e6 < model.num_parameters() < 0.48e6
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.vocab_size == len(tokenizer)
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 1.5e6


def test_model_path_resolves_only_the_embedded_model(tmp_path):
    assert model_path("quickstart") == str(SHIPPED)
    other_names = ["Qwen/Qwen3-0.6B", str(tmp_path)]
    assert [model_path(name) for name in other_names] == other_names
