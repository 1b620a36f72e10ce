"""Conversion of chats, tools and tool calls of cluster.v1.Inference."""

from __future__ import annotations

import re
from typing import Any

from core.rpc import inference_pb2 as pb
from core.types.errors import RequestError
from core.types.request import Grammar
from frontend.chat.call_shape import object_of
from frontend.chat.chat import Chat, opens_answer
from frontend.openai.constraints import forced_grammar
from frontend.openai.messages import FUNCTION_NAME, FunctionAsTool
from frontend.text.events import Delta

_TOOL_NAME = re.compile(FUNCTION_NAME)


def chat_of(chat: pb.Chat) -> Chat:
    """Convert a chat. Raises RequestError."""
    add_generation_prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    opens = opens_answer(add_generation_prompt, is_continued=chat.continue_final_message)
    tools = tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(chat.tools))
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise RequestError("tools: two tools have the same name", param="tools")
    return Chat(
        messages=tuple(map(_message, chat.messages)),
        variables=object_of(chat.template_variables, "template_variables"),
        reasoning_effort=chat.reasoning_effort or None,
        tools=() if chat.tool_choice.none else tools,
        is_parallel=chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"),
        forced=_forced(chat),
        is_continued=chat.continue_final_message,
        opens_answer=opens,
    )


def forced_grammar_of(chat: pb.Chat, made: Chat) -> Grammar | None:
    """Return the grammar of an answer that must be calls, or None. made: `chat`, converted. Raises RequestError."""
    if made.forced is None:
        return None
    functions = [
        FunctionAsTool(**converted["function"], strict=tool.strict)
        for tool, converted in zip(chat.tools, made.tools, strict=True)
    ]
    return forced_grammar(made.forced, functions, is_parallel=made.is_parallel)


def tool_calls_of(delta: Delta) -> list[pb.ToolCallDelta]:
    return [
        pb.ToolCallDelta(index=call.number, id=call.id, name=call.name, arguments=call.arguments)
        for call in delta.calls
        if call.broken is None
    ]


def _forced(chat: pb.Chat) -> str | None:
    """Return Chat.forced. Raises RequestError."""
    kind = chat.tool_choice.WhichOneof("kind")
    if kind not in ("required", "name") or not getattr(chat.tool_choice, kind):
        return None
    if not chat.tools:
        raise RequestError("tool_choice: requires tools", param="tool_choice")
    return chat.tool_choice.name


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if value := getattr(message, name):
            converted[name] = value
    if message.tool_calls:
        converted["content"] = message.content or None
        converted["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return converted


def _tool(tool: pb.Tool, path: str) -> dict[str, Any]:
    if not _TOOL_NAME.fullmatch(tool.name):
        text = f"{path}.name: must be 1 to 128 of the characters A-Z a-z 0-9 _ . : / -"
        raise RequestError(text, param=f"{path}.name")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = object_of(tool.parameters, f"{path}.parameters")
    return {"type": "function", "function": function}
