"""Display text of tokens, safe in a page, a picture and a terminal.

Responses are untrusted: they may contain invalid bytes, terminal escapes, invisible characters and marks that change
the direction of writing. Every text that is drawn passes through `visible` first.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

NEWLINE, TAB = "↵", "⇥   "
# Joiners and the selectors of text and emoji shape the characters beside them; they are kept next to visible ones.
_JOINERS = "\u200c\u200d\ufe0e\ufe0f"
# Letters and marks without a shape (Unicode's default ignorable characters): fillers and variation selectors.
_SHAPELESS = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
# Characters that byte-level tokenizers write bytes as.
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenText:
    """Display text of one token."""

    text: str  # visible; a byte of an incomplete character is `⟨F0⟩`, a line feed is `↵` and a line feed
    character: str | None = None  # that the token contains a part of
    special: bool = False  # whether it is a control token of the tokenizer


def visible(text: str) -> str:
    """Text with invisible and misleading characters written as `⟨U+202E⟩`.

    These are control characters (except the line feed, and the tab, which becomes an arrow), direction marks,
    zero-width characters, fillers, variation selectors, line and paragraph separators, lone surrogates, and unassigned
    code points.
    """
    hidden = set(filter(_is_hidden, text))
    if not hidden.union(_JOINERS).issuperset(text):  # joiners have something to shape
        hidden.difference_update(_JOINERS)
    spelled_out = {code: f"⟨U+{code:04X}⟩" for code in map(ord, hidden)}
    return text.translate(spelled_out).replace("\t", TAB)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[TokenText]:
    """Each token's text, and which character it is a part of where a character spans tokens."""
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    control.update(tokenizer.all_special_ids)
    raw = []
    for i in ids:
        raw.append(str(tokenizer.convert_ids_to_tokens(i)).encode() if i in control else _bytes(tokenizer, i))
    texts = []
    for i, (text, character) in zip(ids, _split_characters(raw), strict=True):
        text = text.replace("\n", f"{NEWLINE}\n")
        texts.append(TokenText(text, character, special=i in control))
    return texts


def _is_hidden(character: str) -> bool:
    if character in "\n\t":
        return False
    is_other = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return is_other or _SHAPELESS.match(character) is not None


def _split_characters(tokens: Sequence[bytes]) -> list[tuple[str, str | None]]:
    """(visible text, character that the token contains a part of) of each token, from the bytes of all tokens."""
    owner = [index for index, token in enumerate(tokens) for _ in token]
    texts = [""] * len(tokens)
    parts: list[str | None] = [None] * len(tokens)
    start = 0
    for character in b"".join(tokens).decode("utf-8", "surrogateescape"):
        encoded = character.encode("utf-8", "surrogateescape")
        owners = owner[start : start + len(encoded)]
        is_character = not "\udc80" <= character <= "\udcff"  # otherwise an invalid byte
        if is_character and owners[0] == owners[-1]:
            texts[owners[0]] += character
        else:
            for index, byte in zip(owners, encoded, strict=True):
                texts[index] += f"⟨{byte:02X}⟩"
                parts[index] = visible(character) if is_character else parts[index]
        start += len(encoded)
    return list(zip(map(visible, texts), parts, strict=True))


def _bytes(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bytes:
    """Bytes of a token, read by the kind of the tokenizer's decoder; of its decoded text for other kinds."""
    token = tokenizer.convert_ids_to_tokens(int(token_id))
    if token is None:
        return f"⟨id {token_id}⟩".encode()
    kinds = _decoder_kinds(tokenizer)
    if "ByteLevel" in kinds:
        is_bytes = all(c in _BYTE_OF for c in token)  # else an added token such as `<｜tool▁calls▁begin｜>`
        return bytes(_BYTE_OF[c] for c in token) if is_bytes else token.encode("utf-8", "surrogatepass")
    if "ByteFallback" in kinds and (match := _FALLBACK_BYTE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    if "▁" in token:
        return token.replace("▁", " ").encode("utf-8", "surrogatepass")
    return tokenizer.decode([token_id]).encode("utf-8", "surrogatepass")


def _decoder_kinds(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}
