import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from credit_trl.lab.analysis.tokentext import token_texts, visible
from tables import rows_of
from tiny import build_tokenizer

quick = settings(max_examples=60, deadline=None)


def shown(tokenizer, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return "".join(token.text for token in token_texts(tokenizer, ids))


@pytest.mark.parametrize(("text", "expected"), rows_of(__file__, "hidden_characters"))
def test_hidden_characters_are_spelled_out(text, expected):
    assert visible(text) == expected


@quick
@given(text=st.text(alphabet=st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"])))
def test_ascii_tokens_join_to_the_text(tokenizer, text):
    assert shown(tokenizer, text) == text


def test_split_characters_are_shown_as_bytes_and_named(tokenizer):
    tokens = token_texts(tokenizer, tokenizer("aé🙂")["input_ids"])
    assert [t.text for t in tokens] == ["a", "⟨C3⟩", "⟨A9⟩", "⟨F0⟩", "⟨9F⟩", "⟨99⟩", "⟨82⟩"]
    assert [t.character for t in tokens] == [None, "é", "é", "🙂", "🙂", "🙂", "🙂"]


def test_added_tokens_of_byte_level_tokenizers_are_shown_as_written():
    added = ["<｜tool▁calls▁begin｜>", "日本", "<think>"]
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(added)
    text = "x".join(added)
    assert shown(tokenizer, text) == text == tokenizer.decode(tokenizer(text)["input_ids"])


def test_sentencepiece_bytes_and_spaces_are_read():
    vocabulary = ["<unk>", "▁Paris", "<0xE2>", "<0x82>", "<0xAC>", "s"]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokens = token_texts(tokenizer, [1, 2, 3, 4, 5])
    assert [t.text for t in tokens] == [" Paris", "⟨E2⟩", "⟨82⟩", "⟨AC⟩", "s"]
    assert tokens[2].character == "€"
