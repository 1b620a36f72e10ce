"""A conversation with its tools, and calls of them, between cluster.v1.Inference and the router's own words."""

from __future__ import annotations

import re
from typing import Any

from cluster.rpc import inference_pb2 as pb
from cluster.words.errors import RequestError
from router.text.call_arguments import object_of
from router.text.chat import Chat
from router.text.events import Delta

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def chat_of(chat: pb.Chat) -> Chat:
    """Raises RequestError."""
    tools = tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(chat.tools))
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise RequestError("tools: a name is there twice", param="tools")
    return Chat(
        messages=tuple(map(_message, chat.messages)),
        tools=tools,
        is_parallel=chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"),
    )


def tool_calls_of(delta: Delta) -> list[pb.ToolCallDelta]:
    return [
        pb.ToolCallDelta(index=call.number, id=call.id, name=call.name, arguments=call.arguments)
        for call in delta.calls
        if call.broken is None
    ]


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        told["content"] = message.content or None
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return told


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
