"""Rendering of conversations with the model's Jinja chat template, as in transformers.

Neither the template, which comes with the model, nor the messages are trusted: the template runs in a sandbox on plain
strings, lists and dicts, and input and output are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta

from core.types.errors import ClusterError, RequestError, SpecError
from frontend.chat.call_shape import CallShape
from frontend.chat.template_bounds import MAX_TEXT_CHARS
from frontend.chat.template_sandbox import environment

MAX_TEMPLATE_CHARS = 256 * 1024  # the longest in use are about 20 KiB

Message = Mapping[str, Any]

# Every template supports these or rejects them. Other roles may be dropped silently, so they are probed.
_ROLES = frozenset(("system", "user", "assistant", "tool"))
_DEVELOPER = "developer"  # OpenAI's newer name of system
_PROBE = "PROBE-5e0c-"
_TAG = "CONTINUE-HERE-7c1f "  # appended to the last message to find where the answer continues it


class ChatTemplate:
    """Chat template of a model, compiled once. `render` is pure and thread-safe."""

    def __init__(self, source: str | None, *, special_tokens: Mapping[str, str]) -> None:
        """source: None: the model has no template, and conversations are rejected. Raises SpecError."""
        self._special_tokens = dict(special_tokens)
        self._template = None
        self.source = source or ""
        self.variables = frozenset[str]()  # referenced by the template
        self.knows_tools = False  # whether the template renders tools
        self._calls = CallShape()
        if source is None:
            return
        if len(source) > MAX_TEMPLATE_CHARS:
            raise SpecError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are accepted"
            )
        try:
            self._template = environment().from_string(source)
        except TemplateSyntaxError as error:
            raise SpecError(f"chat template: no valid Jinja, line {error.lineno}: {error}") from error
        self.variables = frozenset(meta.find_undeclared_variables(environment().parse(source)))
        self.knows_tools = "tools" in self.variables
        if self.knows_tools:
            self._calls = CallShape.of(self._try)

    def render(
        self,
        messages: Sequence[Message],
        *,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        opens_answer: bool = True,
        is_continued: bool = False,
    ) -> str:
        """Return the prompt, ending where the assistant's answer begins, or continues the last message if is_continued.

        A message has a role, a content (a string or None) and other keys that the template may use; call arguments are
        JSON text. variables: set by the client, e.g. enable_thinking. Raises RequestError, with the template's message
        if it rejects the conversation.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a prompt to /v1/completions", param="messages")
        if not messages:
            raise RequestError("messages: must not be empty", param="messages")
        if tools and not self.knows_tools:
            text = "tools: not supported by this model's chat template; the operator can set model.chat_template"
            raise RequestError(text, param="tools")
        converted = self._calls.convert(messages)
        self._name_roles(converted)
        if is_continued:
            if not isinstance(converted[-1]["content"], str):
                raise RequestError("continue_final_message: the last message has no text", param="messages")
            converted[-1]["content"] += _TAG
        context = {
            **(variables or {}),
            **self._special_tokens,
            "messages": converted,
            "add_generation_prompt": opens_answer,
            "tools": list(tools) or None,
            "documents": None,
        }
        text = self._guarded(context)
        return _up_to_tag(text, str(messages[-1]["content"])) if is_continued else text

    def _name_roles(self, converted: Sequence[dict[str, Any]]) -> None:
        """Map roles to the template's. Raises RequestError for a role that it would drop silently."""
        unknown = dict[str, int]()
        for number, message in enumerate(converted):
            if message["role"] == _DEVELOPER and _DEVELOPER not in self.source:
                message["role"] = "system"
            if message["role"] not in _ROLES:
                unknown.setdefault(message["role"], number)
        if not unknown:
            return
        probe = [{"role": role, "content": f"{_PROBE}{number}-"} for role, number in unknown.items()]
        text = self._try([{"role": "user", "content": "a"}, *probe])
        for role, number in unknown.items():
            if text is not None and f"{_PROBE}{number}-" not in text:
                param = f"messages[{number}].role"
                text = f"{param}: role {role[:32]!r} is not supported by this model's chat template"
                raise RequestError(text, param=param)

    def _try(self, messages: Sequence[Message]) -> str | None:
        """Render a probe. Return None if the template rejects it."""
        context = {**self._special_tokens, "messages": messages, "add_generation_prompt": True, "tools": None}
        try:
            return self._guarded(context)
        except RequestError:
            return None

    def _guarded(self, context: dict[str, Any]) -> str:
        try:
            return self._bounded(context)
        except ClusterError:
            raise
        except TemplateError as error:
            raise RequestError(f"rejected by the model's chat template: {error}", param="messages") from error
        except Exception as error:  # boundary: the template is foreign code
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


def _up_to_tag(text: str, last: str) -> str:
    """Cut at the tag. As in transformers, trailing space of the message is kept unless the template strips it."""
    before, tag, after = text.rpartition(_TAG.strip())
    if not tag or last.strip() not in before:
        raise RequestError(
            "continue_final_message: this model's chat template drops the last message's text",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def find_chat_template(model_dir: Path, given: str | None = None) -> str | None:
    """Return the operator's template, given as text or as a file, else that of the model directory.

    The latter is chat_template.jinja, or the (default) one in tokenizer_config.json. Returns None if there is none.
    Raises SpecError.
    """
    if given is not None:
        return given if "{{" in given or "{%" in given else _read(Path(given))
    jinja_file = model_dir / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"model.chat_template: {path} cannot be read: {error}") from None
