"""Rendering of conversations with the model's Jinja chat template, as in transformers.

Neither the template, which comes with the model, nor the messages are trusted: the template runs in a sandbox on plain
strings, lists and dicts, and input and output are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError

from core.model.settings import read_object
from core.model.tokenizer_file import TEKKEN, tekken_format
from core.types.errors import ClusterError, RequestError, SpecError
from frontend.chat.call_shape import CallShape
from frontend.chat.content_parts import ContentParts
from frontend.chat.history import ALTERNATING, INSTRUCTIONS, PROBE, History, Message, tools_as_text
from frontend.chat.template_sandbox import MAX_TEXT_CHARS, environment

MAX_TEMPLATE_CHARS = 256 * 1024  # the longest in use are about 20 KiB

# Arranged by History. Other roles may be dropped silently, so they are probed.
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_DEVELOPER = "developer"  # OpenAI's newer name of system
_SHORT: list[Message] = [{"role": "user", "content": PROBE}]
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_SWITCHES = ("enable_thinking", "thinking", "reasoning")  # boolean template variables of model families
EFFORT = "reasoning_effort"  # a template variable as well
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OF_GPT_OSS = "<|channel|>", ("low", "medium", "high")  # a mark in its template, which prints any effort; its efforts
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # names of templates, as in transformers
_TAG = "CONTINUE-HERE-7c1f "  # appended to the last message to find where the answer continues it


class ChatTemplate:
    """Chat template of a model, compiled once. `render` is pure and thread-safe."""

    def __init__(self, source: str | Mapping[str, str] | None, *, special_tokens: Mapping[str, str]) -> None:
        """source: one template, or several by name: `tool_use` renders chats with tools or calls, `default` the others.
        None: the model has none, and conversations are rejected. Raises SpecError."""
        named = {_DEFAULT: source} if isinstance(source, str) else dict(source or {})
        default = named.get(_DEFAULT, next(iter(named.values()), None))
        self._special_tokens = dict(special_tokens)
        self._template: Template | None = None
        self._with_tools: ChatTemplate | None = None
        self.source = default or ""
        self.variables = frozenset[str]()  # referenced by the template
        self.knows_tools = False  # whether the template renders tools
        self.switches: tuple[str, ...] = ()  # variables that turn thinking on and off
        self.efforts: Mapping[str, str] = {}  # accepted values of reasoning_effort, with a rendering of each
        self.unasked: str | None = None  # the same rendering without any effort
        self._needs_all_fields = False  # of each tool
        self._no_tools: list[Any] | None = None  # the template's value for no tools: None or []
        self._parts = ContentParts()
        self._calls = CallShape()
        self._history = History()
        if default is None:
            return
        if _WITH_TOOLS in named and named[_WITH_TOOLS] != default:
            self._with_tools = ChatTemplate(named[_WITH_TOOLS], special_tokens=special_tokens)
        self._compile(default)

    def _compile(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            limit = f"at most {MAX_TEMPLATE_CHARS} are accepted"
            raise SpecError(f"the chat template has {len(source)} characters; {limit}")
        try:
            self._template = environment().from_string(source)
        except TemplateSyntaxError as error:
            raise SpecError(f"chat template: no valid Jinja, line {error.lineno}: {error}") from error
        self.variables = frozenset(meta.find_undeclared_variables(environment().parse(source)))
        self.knows_tools = "tools" in self.variables or (self._with_tools is not None and self._with_tools.knows_tools)
        self.unasked = self._try(_SHORT)
        if PROBE not in (self.unasked or ""):
            self._parts = ContentParts.of(self._try)
            self.unasked = self._try(_SHORT) if self._parts.are_read else self.unasked
        if self.unasked is None and "tools" in self.variables:
            # Some templates, such as Hermes 3's for tools, loop over the tools even if there are none.
            self.unasked = self._try(_SHORT, tools=[])
            self._no_tools = None if self.unasked is None else []
        if self.unasked is None:
            return  # the template rejects even one user message, so probes show nothing
        self._calls = CallShape.of(self._try)
        self._history = History.of(
            lambda messages: self._try(self._calls.convert(messages)),
            with_tools=lambda messages: self._try(messages, tools=[_TOOL] if self.knows_tools else None),
            knows_developer=_DEVELOPER in source,
        )
        bare = {"type": "function", "function": {"name": "f"}}
        self._needs_all_fields = self.knows_tools and self._try(_SHORT, tools=[bare]) is None
        known = [name for name in _SWITCHES if name in self.variables]
        self.switches = tuple(name for name in known if self._try_with(name, True) != self._try_with(name, False))
        if EFFORT in self.variables:
            mark, few = _OF_GPT_OSS
            texts = {effort: self._try_with(EFFORT, effort) for effort in (few if mark in source else EFFORTS)}
            self.efforts = {effort: text for effort, text in texts.items() if text is not None}

    @property
    def sources(self) -> str:
        """Text of all templates in use, which shows the format of answers."""
        return self.source + (self._with_tools.source if self._with_tools else "")

    def render(
        self,
        messages: Sequence[Message],
        *,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        opens_answer: bool = True,
        is_continued: bool = False,
        paths: Sequence[str] = (),
        writes_tools: bool = False,
    ) -> str:
        """Return the prompt. It ends where the answer begins, or, if is_continued, where the last message's text ends.

        A message has a role, a content (a string or None) and other keys that the template may use; call arguments are
        JSON text. variables: set by the client, e.g. enable_thinking. paths: names of the messages in the client's
        body, for errors. writes_tools: show tools, calls and results as text instead of the template's own form.
        Raises RequestError, with the template's message if it rejects the conversation.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a prompt to /v1/completions", param="messages")
        if not messages:
            raise RequestError.at("messages", "must not be empty")
        if tools and not self.knows_tools and not writes_tools:
            problem = "not supported by this model's chat template; the operator can set model.tool_parser to generic"
            raise RequestError.at("tools", problem)
        if self._with_tools and not writes_tools and (tools or any("tool_calls" in message for message in messages)):
            return self._with_tools.render(messages, variables=variables, tools=tools, opens_answer=opens_answer,
                                           is_continued=is_continued, paths=paths)  # fmt: skip
        paths = paths or [f"messages[{number}]" for number in range(len(messages))]
        for message, path in zip(messages, paths, strict=True):
            self._calls.check(message, path)
        self._check_roles(messages, paths)
        if is_continued and not isinstance(messages[-1]["content"], str):
            raise RequestError("continue_final_message: the last message has no text", param="messages")
        shown = () if writes_tools else map(_with_all_fields, tools) if self._needs_all_fields else tools
        context = {
            **(variables or {}),
            **self._special_tokens,
            "add_generation_prompt": opens_answer,
            "tools": [*shown] or self._no_tools,
            "documents": None,
        }
        history = self._history
        if writes_tools:
            history = replace(history, keeps_calls=False, keeps_orphans=False)
            messages = _with_instructions(messages, tools_as_text(tools)) if tools else messages
        text = self._arranged(messages, context, history, is_continued=is_continued)
        return _up_to_tag(text, str(messages[-1]["content"])) if is_continued else text

    def _arranged(
        self, messages: Sequence[Message], context: dict[str, Any], history: History, *, is_continued: bool
    ) -> str:
        """Render the arranged messages. If the template rejects them, try again with the ALTERNATING history."""
        rejection: RequestError | None = None
        for one in (history, ALTERNATING):
            arranged = self._calls.convert(one.arranged(messages))
            if is_continued:
                arranged[-1]["content"] = f"{arranged[-1]['content'] or ''}{_TAG}"
            try:
                return self._guarded({**context, "messages": arranged})
            except RequestError as error:
                if error.__cause__ is None or isinstance(error.__cause__, SecurityError):  # a limit
                    raise
                rejection = rejection or error
        assert rejection
        raise rejection

    def _check_roles(self, messages: Sequence[Message], paths: Sequence[str]) -> None:
        """Raise RequestError for a role that the template would drop silently."""
        unknown = dict[str, str]()  # path of the first message, by role
        for message, path in zip(messages, paths, strict=True):
            if message["role"] not in _ROLES:
                unknown.setdefault(message["role"], path)
        if not unknown:
            return
        probe = [{"role": role, "content": f"{PROBE}{number}-"} for number, role in enumerate(unknown)]
        text = self._try([*_SHORT, *probe])
        for number, (role, path) in enumerate(unknown.items()):
            if text is not None and f"{PROBE}{number}-" not in text:
                problem = f"role {role[:32]!r} is not supported by this model's chat template"
                raise RequestError.at(f"{path}.role", problem)

    def _try_with(self, name: str, value: Any) -> str | None:
        return self._try(_SHORT, **{name: value})

    def _try(self, messages: Sequence[Message], **variables: Any) -> str | None:
        """Render a probe. Return None if the template rejects it."""
        context = {"tools": self._no_tools, **variables, **self._special_tokens}
        try:
            return self._guarded({**context, "messages": messages, "add_generation_prompt": True})
        except RequestError:
            return None

    def _guarded(self, context: dict[str, Any]) -> str:
        assert self._template is not None
        parts, size = list[str](), 0
        try:
            for part in self._template.generate({**context, "messages": self._parts.convert(context["messages"])}):
                parts.append(part)
                size += len(part)
                if size > MAX_TEXT_CHARS:
                    raise RequestError(f"the rendered messages exceed {MAX_TEXT_CHARS} characters", param="messages")
        except ClusterError:
            raise
        except TemplateError as error:
            raise RequestError(f"rejected by the model's chat template: {error}", param="messages") from error
        except Exception as error:  # boundary: the template is foreign code
            raise RequestError(f"the model's chat template failed: {error!r}", param="messages") from error
        return "".join(parts)


def _with_instructions(messages: Sequence[Message], text: str) -> list[Message]:
    """Add a system message behind the leading ones; History merges them."""
    first = len([*takewhile(lambda message: message["role"] in INSTRUCTIONS, messages)])
    return [*messages[:first], {"role": "system", "content": text}, *messages[first:]]


def _with_all_fields(tool: Mapping[str, Any]) -> dict[str, Any]:
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**empty, **tool["function"]}}


def _up_to_tag(text: str, last: str) -> str:
    """Cut the text at the tag. As in transformers, keep the message's trailing space unless the template strips it."""
    before, tag, after = text.rpartition(_TAG.strip())
    if not tag or last.strip() not in before:
        raise RequestError.at("continue_final_message", "this model's chat template drops the last message's text")
    return before if after.startswith(" ") else before.rstrip()


_TEKKEN_VERSIONS = (7, 11, 13)
_DEEPSEEK = "DeepseekV32ForCausalLM"


def find_chat_template(model_dir: Path, given: str | None = None) -> Mapping[str, str] | None:
    """Return the operator's template, given as text or as a file, else those of the model directory, by name.

    A directory's templates are chat_template.jinja and additional_chat_templates/NAME.jinja, or those in
    tokenizer_config.json or chat_template.json: a text, or several by name. Without those, some models have a template
    of ours. Returns None if there is none. Raises SpecError.
    """
    if given is not None:
        return {_DEFAULT: given if "{{" in given or "{%" in given else _read(Path(given))}
    files = {path.stem: path for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
    if (default := model_dir / "chat_template.jinja").is_file():
        files[_DEFAULT] = default
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if found := _named(read_object(model_dir / name, missing_ok=True).get("chat_template")):
            return found
    return _ours(model_dir)


def _ours(model_dir: Path) -> Mapping[str, str] | None:
    """Return our template for a model that describes its format in other files; None for other models."""
    here = Path(__file__).parent
    if (model_dir / TEKKEN).is_file():
        version, tokens = tekken_format(model_dir / TEKKEN)
        thought = [token for token in ("[THINK]", "[/THINK]") if token in tokens]
        head = f"{{%- set version = {version} %}}{{%- set thought = {thought} %}}"
        return {_DEFAULT: head + _read(here / "mistral.jinja")} if version in _TEKKEN_VERSIONS else None
    if _DEEPSEEK in (read_object(model_dir / "config.json", missing_ok=True).get("architectures") or ()):
        return {_DEFAULT: _read(here / "deepseek_v32.jinja")}
    return None


def _named(given: Any) -> dict[str, str]:
    """Return templates by name, from a text, {name: text} or [{"name": name, "template": text}, …]."""
    if isinstance(given, str):
        return {_DEFAULT: given}
    if isinstance(given, list):
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, Mapping)}
    if not isinstance(given, Mapping):
        return {}
    return {name: text for name, text in given.items() if isinstance(name, str) and isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"model.chat_template: {path} cannot be read: {error}") from None
