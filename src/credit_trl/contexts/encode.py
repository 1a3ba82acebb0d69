"""Token ids of trusted text with slots, and of the untrusted text of z that fills them.

No token spans both, and no control token in z ends a turn or begins one.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from credit_trl.contexts.tokens import PrivilegedContext

# Ids of trusted text, and names of the parts of z that stand between them.
SlottedIds = list[list[int] | str]

# Parts of z, in the order in which they are cut.
PARTS = ("feedback", "demonstration")
MAX_CACHED = 1024  # prompts and texts whose ids are kept


def placeholder() -> str:
    """A text that no prompt contains."""
    return f"\x02{secrets.token_hex(16)}\x03"


def fill(slotted: SlottedIds, parts: Mapping[str, list[int]]) -> list[int]:
    """Ids of a text with parts of z in its slots."""
    ids = []
    for piece in slotted:
        ids.extend(parts[piece] if isinstance(piece, str) else piece)
    return ids


class TextEncoder:
    """Encodes text with the tokenizer of the student.

    Args:
        tokenizer: tokenizer of the student.
        control_ids: ids that no part of z may contain, besides the tokenizer's special tokens.

    Attributes:
        slots: for each part of z the text that stands for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.slots = {part: placeholder() for part in PARTS}
        self.slotted = lru_cache(MAX_CACHED)(self._encode_slotted)
        self.encode_inside = lru_cache(MAX_CACHED)(self._encode_inside)  # siblings share demonstrations
        self._adds_space = self.encode("\nx") != self.encode("\n") + self.encode("x")
        special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._control_ids = special_ids.union(tokenizer.all_special_ids, control_ids)

    def encode(self, text: str, *, adds_special: bool = False) -> list[int]:
        """Ids of trusted text; `adds_special` adds the tokenizer's special tokens, as for plain-text prompts."""
        return self.tokenizer(text, add_special_tokens=adds_special)["input_ids"]

    def encode_parts(self, z: PrivilegedContext) -> dict[str, list[int]]:
        """Ids of the parts that z has, as plain text; lone surrogates are replaced.

        Raises:
            ValueError: the tokenizer encodes text of a part as control tokens.
        """
        parts = {}
        for part in PARTS:
            text = getattr(z, part)
            if text is None:
                continue
            ids = self.encode_inside(text.encode("utf-8", "replace").decode(), split_special_tokens=True)
            if not self._control_ids.isdisjoint(ids):
                raise ValueError(
                    f"The {part} encodes to control tokens although `split_special_tokens=True`: the tokenizer "
                    f"{type(self.tokenizer).__name__} cannot encode untrusted text safely. Use another one."
                )
            parts[part] = ids
        return parts

    def _encode_slotted(self, text: str, *, adds_special: bool = False) -> SlottedIds:
        """Ids of trusted text that has slots; `adds_special` as in `encode`."""
        part_of_slot = {slot: part for part, slot in self.slots.items()}
        opening, *pieces = re.split(f"({'|'.join(part_of_slot)})", text)
        encode_opening = partial(self.encode, adds_special=adds_special)
        if not pieces:
            return [encode_opening(opening)]
        slotted: SlottedIds = [self._encode_before_word(encode_opening, opening)]
        for piece in pieces[:-1]:
            if piece in part_of_slot:
                slotted.append(part_of_slot[piece])
            else:
                slotted.append(self._encode_before_word(self.encode_inside, piece))
        slotted.append(self.encode_inside(pieces[-1]))
        return slotted

    def _encode_before_word(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """Ids of text as it is encoded before a word: byte-level tokenizers split its last whitespace there."""
        ids = encode(f"{text}x")
        word = self.encode_inside("x")
        if text[-1:].isspace() and ids[-len(word) :] == word:
            return ids[: -len(word)]
        return encode(text)

    def _encode_inside(self, text: str, **options: Any) -> list[int]:
        """Ids of text inside another, without the space that some tokenizers put before a text."""
        encode = partial(self.tokenizer, add_special_tokens=False, **options)
        if self._adds_space:
            newline = encode("\n")["input_ids"]
            ids = encode(f"\n{text}")["input_ids"]
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
        return encode(text)["input_ids"]
