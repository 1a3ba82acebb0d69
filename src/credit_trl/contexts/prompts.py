"""Prompts as text and as conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl.data_utils import prepare_multimodal_messages

Prompt = str | list[dict[str, Any]]

Render = Callable[..., str]  # of a conversation; `add_generation_prompt=False` leaves out what opens the model's turn


def chat_renderer(
    processor: Any, is_multimodal: bool, tools: list[Any] | None, chat_template: str | None, options: dict[str, Any]
) -> Render:
    """Conversations → the chat template's text, as TRL renders a student's prompt up to tokenisation.

    Args:
        processor: the tokenizer, or the processor of a multimodal model.
        is_multimodal: messages are turned into lists of parts.
        tools: of the sample's environment, or None.
        chat_template: None for the tokenizer's own.
        options: `chat_template_kwargs`.
    """

    def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        return processor.apply_chat_template(
            prepare_multimodal_messages(messages) if is_multimodal else messages,
            tools=tools or None,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **options,
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


def without_question(prompt: Prompt) -> Prompt:
    """The prompt with nothing asked: its system messages and an empty user turn; an empty text for plain text."""
    if isinstance(prompt, str):
        return ""
    turn = prompt[_last_user(prompt)]
    return [*(m for m in prompt if m.get("role") == "system"), *_with_user_text([turn], "")]


def has_images(prompt: Prompt) -> bool:
    """Whether a conversational prompt carries an image part."""
    if isinstance(prompt, str):
        return False
    contents = (message.get("content") for message in prompt)
    return any(part.get("type") == "image" for content in contents if isinstance(content, list) for part in content)


def _last_user(messages: list[dict[str, Any]]) -> int:
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "user":
            return index
    raise ValueError(
        f"A prompt needs a user turn for the teacher's context; its roles are {[m.get('role') for m in messages]}."
    )


def _with_user_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    index = _last_user(messages)
    content: Any = text
    if isinstance(messages[index].get("content"), list):
        content = [{"type": "text", "text": text}]
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]
