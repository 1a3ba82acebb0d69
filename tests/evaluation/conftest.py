"""A tokenizer that parses responses."""

from __future__ import annotations

from importlib.resources import files

import pytest
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import add_response_schema

from tiny import build_tokenizer


@pytest.fixture
def parsing() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with Qwen3's chat template, and the response parser that TRL adds in runs with tools."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = files("trl").joinpath("chat_templates", "qwen3.jinja").read_text("utf-8")
    tokenizer = add_response_schema(tokenizer)
    if getattr(tokenizer, "response_template", None) is None:
        pytest.importorskip("jmespath")  # with which transformers < 5.13 parses
    return tokenizer
