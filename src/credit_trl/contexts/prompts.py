"""Prompts in plain-text and conversational form."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from datasets import IterableDataset

from credit_trl.rollout.batch import Prompt, content_key
from credit_trl.sandbox.user_code import explained_errors
from credit_trl.trl_compat import prepare_multimodal_messages

# Chained ones too, such as `zip://picture.png::https://host/pictures.zip`.
_ADDRESS = re.compile(r"(?:^|::)(?!file:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_PROMPT_COLUMNS = ("prompt", "image", "images")
Render = Callable[..., str]  # conversation to text; takes `tools` and `add_generation_prompt`, True by default


def chat_renderer(processor: Any, is_multimodal: bool = False, **options: Any) -> Render:
    """Function that renders a conversation with the chat template, as TRL renders the student's prompts.

    Args:
        processor: tokenizer, or processor of a multimodal model.
        is_multimodal: whether messages are converted to lists of parts.
        **options: `chat_template_kwargs`, and `chat_template`.
    """

    def render(messages: list[dict[str, Any]], **changed: Any) -> str:
        if is_multimodal:
            messages = prepare_multimodal_messages(messages)
        defaults = {"add_generation_prompt": True, "tokenize": False}
        return processor.apply_chat_template(messages, **(defaults | options | changed))

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


def check_rows(name: str, prompts: Iterable[Any], *, needs_user: bool = False, form: type | None = None) -> None:
    """Check that all prompts have the form of the first, which a run may reach only after hours.

    `form` is the type of a first prompt that is not among them.

    Raises:
        ValueError: one is neither text nor messages, or has another form than the first, or is the text of
            messages, or has no user turn although `needs_user`, or an address as an image.
    """
    for row, prompt in enumerate(prompts):
        form = form or type(prompt)
        fix = None
        if not is_prompt(prompt):
            fix = "Give the column `prompt` text, or messages with `role` and `content`."
        elif not isinstance(prompt, form):
            fix = "Give all prompts the form of the first: text, or messages."
        elif isinstance(prompt, str) and re.match(r"""\s*\[?\s*\{\s*['"](role|content)['"]""", prompt):
            fix = "It is the text of messages: store lists, as `json.loads` or `ast.literal_eval` read them."
        elif needs_user and isinstance(prompt, list) and "user" not in _roles(prompt):
            fix = "The teacher's prompt needs a user turn: add a message with the role 'user'."
        if fix is not None:
            raise ValueError(f"Row {row} of {name} is the prompt {prompt!r:.80}. {fix}")
        check_local_images(prompt)


@lru_cache(maxsize=4)
def first_streamed_row(dataset: Any) -> dict[str, Any] | None:
    """First row of a stream that does not tell its columns; None of other data.

    Raises:
        ValueError: there is no row. An error of the function that makes the rows keeps its type.
    """
    if not (isinstance(dataset, IterableDataset) and dataset.column_names is None):
        return None
    with explained_errors("Reading a stream", "Each row is a dictionary of columns: correct what makes them."):
        row = next(iter(dataset), None)
    if not isinstance(row, dict):
        problem = "has no rows" if row is None else f"has the row {row!r:.80}"
        raise ValueError(f"A stream {problem}. Let it yield dictionaries with the column `prompt`.")
    return row


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
    if isinstance(prompt, str):
        return []
    parts = []
    for message in prompt:
        parts += [part for part in _parts(message) if part.get("type") == kind]
    return parts


def images_of(prompt: Prompt) -> list[Any]:
    """Images of a prompt; None for a part that a column of the dataset row fills."""
    return [part.get("image") for part in parts_of(prompt, "image")]


def remote_image(prompt: Prompt, images: Iterable[Any] = ()) -> str | None:
    """The address of an image of a prompt or of its dataset row, which processors would fetch; None without one."""
    pending = list(images)
    if not isinstance(prompt, str):
        for message in prompt or []:
            for part in _parts(message):
                if part.get("type") != "text":
                    pending.append(part)
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values() if value.get("bytes") is None else ()  # whose path is a name only
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
    sources = iter(images)
    messages = []
    for message in prompt:
        parts = _parts(message)
        if not parts:
            messages.append(message)
            continue
        content = []
        for part in parts:
            if part.get("type") != "image":
                content.append(part)
            elif images:
                content.append({**part, "image": next(sources)})
        messages.append({**message, "content": content})
    return messages


def share_images(prompt: Prompt, shared: dict[str, Any]) -> Prompt:
    """The prompt with the image of the same content that an earlier call has met."""
    images = images_of(prompt)
    for i, image in enumerate(images):
        images[i] = shared.setdefault(content_key(image), image)
    return with_images(prompt, images)


def prompt_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a dataset row from which its prompt is formed."""
    return {name: row[name] for name in _PROMPT_COLUMNS if name in row}


def row_prompt(row: Mapping[str, Any]) -> Prompt:
    """The prompt of a dataset row with the images of its column `images` or `image`, as TRL forms it.

    Raises:
        ValueError: the prompt has another number of image parts without an image, or is plain text, or an image is
            an address.
    """
    prompt = row.get("prompt")
    column = row.get("images", [row.get("image")])
    images = [image for image in column or [] if image is not None]
    check_local_images(prompt, images)
    if images and isinstance(prompt, str):
        raise ValueError(f"A row with images has a plain-text prompt: {prompt[:80]!r}. Write prompts as messages.")
    has_column = "images" in row or "image" in row
    is_open = isinstance(prompt, list) and any(image is None for image in images_of(prompt))
    if has_column and (images or is_open):
        return prepare_multimodal_messages(prompt, images=images)
    return prompt


def with_images_in_prompts(rows: Sequence[Mapping[str, Any]], is_multimodal: bool) -> list[dict[str, Any]]:
    """Dataset rows whose prompts hold the images of their columns, which are removed.

    For a multimodal model the prompts of rows with such columns have lists of parts, with images or without.
    Equal images are one object, so that TRL gathers an image once for its group.
    """
    shared: dict[str, Any] = {}
    formed = []
    for row in rows:
        formed_row = {}
        if "prompt" in row:  # an environment may give it instead
            prompt = row_prompt(row)
            has_column = "image" in row or "images" in row
            if is_multimodal and has_column and isinstance(prompt, list):
                prompt = prepare_multimodal_messages(prompt)
            formed_row["prompt"] = share_images(prompt, shared)
        for name, value in row.items():
            if name not in _PROMPT_COLUMNS:
                formed_row[name] = value
        formed.append(formed_row)
    return formed


def _roles(messages: list[dict[str, Any]]) -> list[str | None]:
    return [message.get("role") for message in messages]


def _last_user(messages: list[dict[str, Any]]) -> int:
    """Index of the last user turn."""
    roles = _roles(messages)
    if "user" not in roles:
        raise ValueError(
            f"The teacher's prompt needs a user turn; the roles of this prompt are {roles}. "
            "Add a message with the role 'user'."
        )
    return len(roles) - 1 - roles[::-1].index("user")


def with_user_text(messages: list[dict[str, Any]], template: str, place: str) -> list[dict[str, Any]]:
    """The conversation with a text in its last user turn, in which the text of that turn replaces `place`.

    In a turn with images, what stands before and after `place` is added to its first and last text.
    """
    index = _last_user(messages)
    parts = _parts(messages[index])
    content: Any = template.replace(place, user_text(messages))
    if parts != parts_of([messages[index]], "text"):  # it has images
        prefix, suffix = template.split(place)
        content = _with_text(parts, prefix, suffix)
    elif parts:
        content = [{"type": "text", "text": content}]
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]


def _with_text(parts: list[dict[str, Any]], prefix: str, suffix: str) -> list[dict[str, Any]]:
    """Content parts with text before the first and after the last, in one part with a text that is there."""
    parts = list(parts)
    if parts[0].get("type") == "text":
        prefix += parts.pop(0)["text"]
    if parts and parts[-1].get("type") == "text":
        suffix = parts.pop()["text"] + suffix
    content = [{"type": "text", "text": prefix}, *parts, {"type": "text", "text": suffix}]
    return [part for part in content if part.get("type") != "text" or part["text"]]
