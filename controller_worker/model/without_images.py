"""Replaces images by a note, for models that accept none.

Holds: messages without images pass unchanged, so the backend's caches for them stay valid.
Differs: the original drops images silently, and the model does not know that they existed.
"""

from __future__ import annotations

from dataclasses import replace

from controller_worker.providers import (
    LLM,
    NOT_SEEN,
    Completion,
    ImagePart,
    Message,
    MessageMemo,
    ModelRequest,
    count_prompt_tokens,
    has_images,
)


class WithoutImagesLLM:
    """A model that accepts no images."""

    def __init__(self, inner: LLM) -> None:
        self._inner = inner
        self._made: MessageMemo[Message] = MessageMemo()

    async def complete(self, request: ModelRequest) -> Completion:
        """Call the model once. See `LLM.complete`."""
        return await self._inner.complete(self._replace_images(request))

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """See `count_prompt_tokens`."""
        return await count_prompt_tokens(self._inner, self._replace_images(request))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._inner.aclose()

    def _replace_images(self, request: ModelRequest) -> ModelRequest:
        if not any(map(has_images, request.messages)):
            return request
        messages = [
            self._made.of(message, _without_images) if has_images(message) else message for message in request.messages
        ]
        return replace(request, messages=messages)


def _without_images(message: Message) -> Message:
    return replace(
        message, content=tuple(NOT_SEEN if isinstance(part, ImagePart) else part for part in message.content)
    )
