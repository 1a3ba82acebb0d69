"""Prompts in plain-text and conversational form."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from credit_trl.rollout.batch import Prompt, content_key
from credit_trl.trl_compat import prepare_multimodal_messages

# Chained ones too, such as `zip://picture.png::https://host/pictures.zip`.
_ADDRESS = re.compile(r"(?:^|::)(?!file:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)
Render = Callable[..., str]  # conversation to text; takes `tools` and `add_generation_prompt`, True by default


def chat_renderer(processor: Any, is_multimodal: bool = False, **options: Any) -> Render:
    """Function that renders a conversation with the chat template, as TRL renders the student's prompts.

    Args:
        processor: tokenizer, or processor of a multimodal model.
        is_multimodal: whether messages are converted to lists of parts.
        **options: `chat_template_kwargs`, and `chat_template`.
    """

    def render(messages: list[dict[str, Any]], **changed: Any) -> str:
        parts = prepare_multimodal_messages(messages) if is_multimodal else messages
        return processor.apply_chat_template(
            parts, **({"add_generation_prompt": True, "tokenize": False} | options | changed)
        )

    return render


def is_prompt(value: Any) -> bool:
    """Whether a value is text, or a conversation: messages with a role and content or tool calls. Neither is empty."""
    if isinstance(value, str):
        return value != ""
    return isinstance(value, list) and len(value) > 0 and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    return isinstance(content, str) or is_parts or bool(value.get("tool_calls"))


def check_rows(name: str, prompts: Iterable[Any], *, needs_user: bool = False) -> None:
    """Check that all prompts have the form of the first, which a run may reach only after hours.

    Raises:
        ValueError: one is neither text nor messages, or has another form than the first, or is the text of
            messages, or has no user turn although `needs_user`, or an address as an image.
    """
    first = None
    for row, prompt in enumerate(prompts):
        first = first or type(prompt)
        fix = None
        if not is_prompt(prompt):
            fix = "Give the column `prompt` text, or messages with `role` and `content`."
        elif not isinstance(prompt, first):
            fix = "Give all prompts the form of the first: text, or messages."
        elif isinstance(prompt, str) and re.match(r"""\s*\[\s*\{\s*['"](role|content)['"]""", prompt):
            fix = "It is the text of messages: store lists, as `json.loads` or `ast.literal_eval` read them."
        elif needs_user and isinstance(prompt, list) and all(message["role"] != "user" for message in prompt):
            fix = "The teacher's prompt needs a user turn: add a message with the role 'user'."
        if fix is not None:
            raise ValueError(f"Row {row} of {name} is the prompt {prompt!r:.80}. {fix}")
        check_local_images(prompt)


def user_text(prompt: Prompt) -> str:
    """The text of the last user turn; text parts of a structured turn are joined by a space, as SDPO does."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[_last_user(prompt)].get("content", "")
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content if part.get("type") == "text")


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def parts_of(prompt: Prompt, kind: str) -> list[dict[str, Any]]:
    """Content parts of a kind of a conversational prompt, such as `"image"`, in their order."""
    messages = [] if isinstance(prompt, str) else prompt
    return [part for message in messages for part in _parts(message) if part.get("type") == kind]


def images_of(prompt: Prompt) -> list[Any]:
    """Images of a prompt; None for a part that a column of the dataset row fills."""
    return [part.get("image") for part in parts_of(prompt, "image")]


def remote_image(prompt: Prompt, images: Iterable[Any] = ()) -> str | None:
    """The address of an image of a prompt or of its dataset row, which processors would fetch; None without one."""
    pending = list(images)
    for message in [] if isinstance(prompt, str) else prompt or []:
        pending += [part for part in _parts(message) if part.get("type") != "text"]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, str) and _ADDRESS.search(value):
            return value
    return None


def check_local_images(prompt: Prompt, images: Iterable[Any] = ()) -> None:
    """Raise a `ValueError` where an image of a prompt or of its dataset row is an address."""
    address = remote_image(prompt, images)
    if address is not None:
        raise ValueError(
            f"An image is the address {address[:200]!r}, which is not fetched. Download it first, and give the path "
            "of the file or the picture itself."
        )


def with_images(prompt: Prompt, images: Sequence[Any]) -> Prompt:
    """The prompt with other images in the places of its own; without image parts where `images` is empty."""
    if not images_of(prompt):
        return prompt
    rest = iter(images)
    messages = []
    for message in prompt:
        if parts := _parts(message):
            kept = [part for part in parts if images or part.get("type") != "image"]
            filled = [{**part, "image": next(rest)} if part.get("type") == "image" else part for part in kept]
            message = {**message, "content": filled}
        messages.append(message)
    return messages


def share_images(prompt: Prompt, shared: dict[str, Any]) -> Prompt:
    """The prompt with the image of the same content that an earlier call has met."""
    return with_images(prompt, [shared.setdefault(content_key(image), image) for image in images_of(prompt)])


def prompt_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a dataset row from which its prompt is formed."""
    return {name: row[name] for name in ("prompt", "image", "images") if name in row}


def row_prompt(row: Mapping[str, Any]) -> Prompt:
    """The prompt of a dataset row with the images of its column `images` or `image`, as TRL forms it.

    Raises:
        ValueError: the prompt has another number of image parts without an image, or is plain text, or an image is
            an address.
    """
    prompt = row.get("prompt")
    given = row.get("images") if "images" in row else [row.get("image")]
    images = [image for image in given or [] if image is not None]
    check_local_images(prompt, images)
    if images and isinstance(prompt, str):
        raise ValueError(f"A row with images has a plain-text prompt: {prompt[:80]!r}. Write prompts as messages.")
    has_column = "images" in row or "image" in row
    return prepare_multimodal_messages(prompt, images=images) if has_column and isinstance(prompt, list) else prompt


def with_images_in_prompts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Dataset rows whose prompts hold the images of their columns, which are removed.

    Equal images are one object, so that TRL gathers an image once for its group.
    """
    shared: dict[str, Any] = {}
    formed = []
    for row in rows:
        columns = prompt_columns(row)
        others = {name: value for name, value in row.items() if name not in columns}
        if "prompt" in columns:  # an environment may give it instead
            others = {"prompt": share_images(row_prompt(row), shared), **others}
        formed.append(others)
    return formed


def _last_user(messages: list[dict[str, Any]]) -> int:
    if users := [index for index, message in enumerate(messages) if message.get("role") == "user"]:
        return users[-1]
    raise ValueError(
        f"The teacher's prompt needs a user turn; the roles of this prompt are {[m.get('role') for m in messages]}. "
        "Add a message with the role 'user'."
    )


def with_user_text(messages: list[dict[str, Any]], template: str, place: str) -> list[dict[str, Any]]:
    """The conversation with a text in its last user turn, in which the text of that turn replaces `place`.

    In a turn with images, what stands before and after `place` is added to its first and last text.
    """
    index = _last_user(messages)
    parts = _parts(messages[index])
    text = template.replace(place, user_text(messages))
    content: Any = [{"type": "text", "text": text}] if parts else text
    if any(part.get("type") != "text" for part in parts):
        content = _with_text(parts, *template.split(place))
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]


def _with_text(parts: list[dict[str, Any]], before: str, after: str) -> list[dict[str, Any]]:
    """Content parts with text before the first and after the last, in one part with a text that is there."""
    first, last = ({"type": "text", "text": text} for text in (before, after))
    if parts[0].get("type") == "text":
        first["text"] += parts[0]["text"]
        parts = parts[1:]
    if parts and parts[-1].get("type") == "text":
        last["text"] = parts[-1]["text"] + last["text"]
        parts = parts[:-1]
    return [part for part in (first, *parts, last) if part.get("type") != "text" or part["text"]]
