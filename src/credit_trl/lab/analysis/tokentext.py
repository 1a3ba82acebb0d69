"""What a token looks like: text that can be shown anywhere and hides nothing.

Responses are hostile: they may hold bytes that are no character, terminal escapes, invisible characters and marks that
turn the direction of writing. Everything that is drawn (page, picture, terminal) goes through `visible` first.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

NEWLINE, TAB = "↵", "⇥   "
# Joiners shape emoji and several scripts; they are kept beside characters that can be seen.
_JOINERS = "\u200c\u200d"
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenText:
    """One token as shown.

    Args:
        text: visible text; a byte that is no character of its own stands as `⟨F0⟩`, a line's end as `↵` and a line
            feed.
        character: the character that this token holds a part of, or None.
        special: whether it is a control token of the tokenizer.
    """

    text: str
    character: str | None = None
    special: bool = False


def visible(text: str) -> str:
    """The text with everything invisible or misleading spelled out, as `⟨U+202E⟩`.

    Control characters (but the line feed, and the tab, which becomes an arrow), marks of direction, zero-width
    characters, line and paragraph separators, lone surrogates, and characters that are assigned to nothing.
    """
    has_body = any(c not in _JOINERS and not _is_hidden(c) for c in text)
    return "".join(_spelled(c) if _is_hidden(c) and not (has_body and c in _JOINERS) else c for c in text).replace(
        "\t", TAB
    )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[TokenText]:
    """Each token's text, and which character it is a part of where a character spans tokens."""
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(
        tokenizer.all_special_ids
    )
    raw = [str(tokenizer.convert_ids_to_tokens(i)).encode() if i in control else _bytes(tokenizer, i) for i in ids]
    pieces = _split_characters(raw)
    return [
        TokenText(_with_line_marks(text), character, special=i in control)
        for i, (text, character) in zip(ids, pieces, strict=True)
    ]


def display_width(character: str) -> int:
    """Columns that a character takes in a fixed-width font: 0, 1 or 2."""
    if unicodedata.combining(character) or character in _JOINERS:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _is_hidden(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _spelled(character: str) -> str:
    return f"⟨U+{ord(character):04X}⟩"


def _with_line_marks(text: str) -> str:
    return text.replace("\n", f"{NEWLINE}\n")


def _split_characters(tokens: Sequence[bytes]) -> list[tuple[str, str | None]]:
    """(visible text, character that it is a part of) of each token, from the bytes of all."""
    owner = [index for index, token in enumerate(tokens) for _ in token]
    shown = ["" for _ in tokens]
    parts: list[str | None] = [None for _ in tokens]
    start = 0
    for character in b"".join(tokens).decode("utf-8", "surrogateescape"):
        encoded = character.encode("utf-8", "surrogateescape")
        owners = owner[start : start + len(encoded)]
        is_character = not "\udc80" <= character <= "\udcff"  # else a byte that belongs to none
        if is_character and owners[0] == owners[-1]:
            shown[owners[0]] += character
        else:
            for index, byte in zip(owners, encoded, strict=True):
                shown[index] += f"⟨{byte:02X}⟩"
                parts[index] = visible(character) if is_character else parts[index]
        start += len(encoded)
    return [(visible(text), part) for text, part in zip(shown, parts, strict=True)]


def _bytes(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bytes:
    """The bytes that a token stands for, by the kind of its tokenizer; the decoded text where that is unknown."""
    token = tokenizer.convert_ids_to_tokens(int(token_id))
    if token is None:
        return f"⟨id {token_id}⟩".encode()
    kinds = _decoder_kinds(tokenizer)
    if "ByteLevel" in kinds and all(c in _BYTE_OF for c in token):
        return bytes(_BYTE_OF[c] for c in token)
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


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as: printable Latin-1 as itself, the rest from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()
