"""Form of messages' content for one chat template: a text, or a list of parts.

Templates of multimodal models, and of a few text models such as Llama Guard 3 1B, read parts only and drop a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.chat.history import INSTRUCTIONS, PROBE, Message, Render


@dataclass(frozen=True)
class ContentParts:
    """Form that a template needs. text_roles: roles whose content stays a text, in a template that reads parts."""

    are_read: bool = False
    text_roles: frozenset[str] = frozenset()

    @classmethod
    def of(cls, render: Render) -> ContentParts:
        """Probe a template that does not render a user's plain text. It reads parts if it renders a user's parts.

        render: returns None if the template rejects the messages.
        """

        def shows(role: str, content: object) -> bool:
            message: dict[str, object] = {"role": role, "content": content}
            user: dict[str, object] = {"role": "user", "content": _parts("a")}
            messages = [message] if role == "user" else [message, user] if role in INSTRUCTIONS else [user, message]
            return PROBE in (render(messages) or "")

        if not shows("user", _parts(PROBE)):
            return cls()
        others = (*INSTRUCTIONS, "assistant", "tool")
        return cls(True, frozenset(role for role in others if shows(role, PROBE)))

    def convert(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with their texts in the form that the template reads."""
        return [self._converted(message) for message in messages] if self.are_read else messages

    def _converted(self, message: Message) -> Message:
        content = message["content"]
        if not isinstance(content, str) or message["role"] in self.text_roles:
            return message
        return {**message, "content": _parts(content)}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
