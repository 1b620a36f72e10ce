"""A conversation to prompt text, by the model's own Jinja template, as transformers renders it.

The template comes with the model and the messages from a client, so neither is trusted: the template runs in a sandbox
on plain strings, lists and dicts, and what goes in and what comes out is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from cluster.words.errors import RequestError, SpecError
from router.text.template_bounds import MAX_TEXT_CHARS
from router.text.template_sandbox import environment

MAX_TEMPLATE_CHARS = 256 * 1024  # the longest in use are about 20 KiB

Message = Mapping[str, Any]


class ChatTemplate:
    """One model's template, compiled once. `render` is pure and may run on any thread."""

    def __init__(self, source: str | None, *, special_tokens: Mapping[str, str]) -> None:
        """source None: the model has no template, and every conversation is refused. Raises SpecError."""
        self._special_tokens = dict(special_tokens)
        self._template = None
        if source is None:
            return
        if len(source) > MAX_TEMPLATE_CHARS:
            raise SpecError(f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
        try:
            self._template = environment().from_string(source)
        except TemplateSyntaxError as error:
            raise SpecError(f"the chat template is no valid Jinja, line {error.lineno}: {error}") from error

    def render(self, messages: Sequence[Message], *, variables: Mapping[str, Any] | None = None) -> str:
        """The prompt, ending where the assistant's answer begins.

        A message has a role, a content (a string) and what else the template knows. `variables` are the client's own
        (e.g. enable_thinking). Raises RequestError with the template's words where it refuses the conversation.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a prompt to /v1/completions", param="messages")
        if not messages:
            raise RequestError("messages: there must be at least one", param="messages")
        context = {
            **(variables or {}),
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            return self._bounded(context)
        except RequestError:
            raise
        except TemplateError as error:
            raise RequestError(f"the model's chat template refused: {error}", param="messages") from error
        except Exception as error:  # an edge: the template is foreign code and may fail in any way
            raise RequestError(f"the model's chat template failed: {error!r}", param="messages") from error

    def _bounded(self, context: dict[str, Any]) -> str:
        assert self._template is not None
        parts: list[str] = []
        size = 0
        for part in self._template.generate(context):
            parts.append(part)
            size += len(part)
            if size > MAX_TEXT_CHARS:
                raise RequestError(f"the rendered messages exceed {MAX_TEXT_CHARS} characters", param="messages")
        return "".join(parts)


def find_chat_template(model_dir: Path) -> str | None:
    """The template of a model directory: chat_template.jinja, or the (default) one in tokenizer_config.json.

    None where there is none. Raises SpecError.
    """
    alone = model_dir / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    path = model_dir / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except ValueError as error:
        raise SpecError(f"{path}: not readable as JSON: {error}") from None
    if isinstance(found, list):  # several, by name: [{"name": "default", "template": …}, …]
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None
