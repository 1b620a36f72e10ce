"""A conversation to prompt text, by the model's own Jinja template, as transformers renders it.

The template comes with the model and the messages from a client, so neither is trusted: the template runs in a sandbox
on plain strings, lists and dicts, and what goes in and what comes out is bounded.
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

# Every template has words for these, or says that it has none; others it may pass over, and with them what they say.
_ROLES = frozenset(("system", "user", "assistant", "tool"))
_DEVELOPER = "developer"  # OpenAI's newer word for system
_PROBE = "PROBE-5e0c-"
_TAG = "CONTINUE-HERE-7c1f "  # behind the last message, where the answer goes on


class ChatTemplate:
    """One model's template, compiled once. `render` is pure and may run on any thread."""

    def __init__(self, source: str | None, *, special_tokens: Mapping[str, str]) -> None:
        """source None: the model has no template, and every conversation is refused. Raises SpecError."""
        self._special_tokens = dict(special_tokens)
        self._template = None
        self.source = source or ""
        self.variables = frozenset[str]()  # that it looks at
        self.knows_tools = False  # whether it shows the model what it may call
        self._calls = CallShape()
        if source is None:
            return
        if len(source) > MAX_TEMPLATE_CHARS:
            raise SpecError(f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
        try:
            self._template = environment().from_string(source)
        except TemplateSyntaxError as error:
            raise SpecError(f"the chat template is no valid Jinja, line {error.lineno}: {error}") from error
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
        """The prompt, ending where the assistant's answer begins; or goes on, where that is what is_continued says.

        A message has a role, a content (a string or None) and what else the template knows; the arguments of its calls
        are JSON text. `variables` are the client's own (e.g. enable_thinking). Raises RequestError, with the template's
        words where it refuses the conversation.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a prompt to /v1/completions", param="messages")
        if not messages:
            raise RequestError("messages: there must be at least one", param="messages")
        if tools and not self.knows_tools:
            text = "tools: this model's chat template knows none; the operator can give one (model.chat_template)"
            raise RequestError(text, param="tools")
        told = self._calls.told(messages)
        self._name_roles(told)
        if is_continued:
            if not isinstance(told[-1]["content"], str):
                raise RequestError("continue_final_message: the last message has no text", param="messages")
            told[-1]["content"] += _TAG
        context = {
            **(variables or {}),
            **self._special_tokens,
            "messages": told,
            "add_generation_prompt": opens_answer,
            "tools": list(tools) or None,
            "documents": None,
        }
        text = self._guarded(context)
        return _up_to_tag(text, str(messages[-1]["content"])) if is_continued else text

    def _name_roles(self, told: Sequence[dict[str, Any]]) -> None:
        """As the template knows them. Raises RequestError for one whose messages it would leave out without a word."""
        unknown = dict[str, int]()
        for number, message in enumerate(told):
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
                raise RequestError(f"{param}: this model's chat template knows no {role[:32]!r}", param=param)

    def _try(self, messages: Sequence[Message]) -> str | None:
        """None: it refuses these."""
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


def _up_to_tag(text: str, last: str) -> str:
    """As transformers has it: space at the end of the message stays, unless the template takes it away."""
    before, tag, after = text.rpartition(_TAG.strip())
    if not tag or last.strip() not in before:
        raise RequestError(
            "continue_final_message: the model's chat template leaves out the last message's text",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def find_chat_template(model_dir: Path, given: str | None = None) -> str | None:
    """The one that the operator gives, as itself or as a file; else that of the model directory: chat_template.jinja,
    or the (default) one in tokenizer_config.json.

    None where there is none. Raises SpecError.
    """
    if given is not None:
        return given if "{{" in given or "{%" in given else _read(Path(given))
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"model.chat_template: {path} cannot be read: {error}") from None
