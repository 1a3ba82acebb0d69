"""Prompts in plain-text and conversational form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl.data_utils import prepare_multimodal_messages

from credit_trl.rollout.batch import Prompt

Render = Callable[..., str]  # conversation to text; takes `tools` and `add_generation_prompt`, True by default


def chat_renderer(
    processor: Any,
    is_multimodal: bool = False,
    chat_template: str | None = None,
    options: dict[str, Any] | None = None,
) -> Render:
    """Function that renders a conversation with the chat template, as TRL renders the student's prompts.

    Args:
        processor: tokenizer, or processor of a multimodal model.
        is_multimodal: whether messages are converted to lists of parts.
        chat_template: None for the tokenizer's own.
        options: `chat_template_kwargs`.
    """

    kept = {"chat_template": chat_template, "add_generation_prompt": True, "tokenize": False} | (options or {})

    def render(messages: list[dict[str, Any]], **changed: Any) -> str:
        return processor.apply_chat_template(
            prepare_multimodal_messages(messages) if is_multimodal else messages, **(kept | changed)
        )

    return render


def user_text(prompt: Prompt) -> str:
    """The text of the last user turn; text parts of a structured turn are joined by a space, as SDPO does."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[_last_user(prompt)].get("content", "")
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content if part.get("type") == "text")


def has_images(prompt: Prompt) -> bool:
    """Whether a conversational prompt has an image part."""
    if isinstance(prompt, str):
        return False
    contents = (message.get("content") for message in prompt)
    return any(part.get("type") == "image" for content in contents if isinstance(content, list) for part in content)


def _last_user(messages: list[dict[str, Any]]) -> int:
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "user":
            return index
    raise ValueError(
        f"The teacher's prompt needs a user turn; the roles of this prompt are {[m.get('role') for m in messages]}. "
        "Add a message with the role 'user'."
    )


def with_user_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with another text in its last user turn."""
    index = _last_user(messages)
    content: Any = text
    if isinstance(messages[index].get("content"), list):
        content = [{"type": "text", "text": text}]
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]
