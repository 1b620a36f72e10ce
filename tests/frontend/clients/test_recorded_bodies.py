"""Bodies as coding agents and frameworks send them, over several turns, with templates of many families."""

from __future__ import annotations

import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from tests.support.grids import quick
from tests.support.serving import TEMPLATES, Serve

_HERE = Path(__file__).parent
_CLIENTS = {path.stem: json.loads(path.read_text()) for path in sorted(_HERE.glob("*.json"))}
_WITH_TOOLS = [name for name in TEMPLATES if name.endswith("_tools") or name == "channels"]
_THINKS = {"hermes_tools", "mistral_tools"}  # here as models that think, by their own tags


@pytest.mark.parametrize(
    ("name", "client"),
    # By default each client with one template, and each template with one client.
    quick(
        product(_WITH_TOOLS, _CLIENTS),
        [*zip(_WITH_TOOLS, cycle(_CLIENTS)), *(("hermes_tools", client) for client in _CLIENTS)],
    ),
)
async def test_every_turn_is_answered(serve: Serve, client: str, name: str) -> None:
    """Nothing of the conversation is lost, and what the model cannot read is named in a header."""
    recorded: Any = _CLIENTS[client]
    template = TEMPLATES[name] + ("{# </think> <tool_call> #}" if name in _THINKS else "{# <tool_call> #}")
    served, ignored = await serve(chat_template=template, max_context=16384, has_grammars=True), set[str]()
    for body in recorded["turns"]:
        answer = await served.http.post(recorded["path"], json=body)
        assert answer.status_code == 200, answer.text
        ignored |= set(answer.headers.get("x-ignored-fields", "").split(", "))
    prompt = served.prompt
    assert all(text in prompt for text in recorded["prompt"]), prompt
    assert not any(text in prompt for text in recorded["hidden"])
    assert set(recorded["ignored"]) <= ignored


def _chat(*messages: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}, *messages], **fields}


def _claude(*blocks: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    called = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}, **fields}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [*blocks]}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [called]}]
    return "/v1/messages", {"messages": [*said, {"role": "user", "content": [result]}]}


def _served(*blocks: Any) -> tuple[str, dict[str, Any]]:
    """Return a request with an assistant's blocks of tools that ran on a server."""
    texts = [{"type": "text", "text": text} for text in "AB"]
    said = {"role": "assistant", "content": [texts[0], *blocks, texts[1]]}
    hi = {"role": "user", "content": "hi"}
    return "/v1/messages", {"messages": [hi, said, hi]}


def _items(*items: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [{"role": "user", "content": "hi"}, *items]}


def _called(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


_ODD: dict[str, tuple[tuple[str, dict[str, Any]], str, str]] = {  # request, part of the prompt, ignored fields
    "arguments as an object": (_chat(_called({"a": 1})), '"arguments": {"a": 1}', ""),
    "arguments of null": (_chat(_called(None)), '"arguments": {}', ""),
    "arguments with NaN": (_chat(_called('{"a": NaN}')), '"arguments": "{\\"a\\": NaN}"', ""),
    "an argument out of range": (_chat(_called('{"a": 1e400}')), '"arguments": "{\\"a\\": 1e400}"', ""),
    "the older form of a call": (
        _chat({"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"a": 1}'}},
              {"role": "function", "name": "look", "content": "FOUND"}),
        '"arguments": {"a": 1}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nFOUND\n', "",
    ),
    "redacted thinking": (
        _chat({"role": "assistant", "content": [{"type": "redacted_thinking"}, {"type": "text", "text": "T"}]}),
        "assistant\nT<|im_end|>", "",
    ),
    "a custom tool's call": (
        _chat({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "p", "input": "x"}}]}),
        '{"name": "p", "arguments": {"input": "x"}}', "",
    ),
    "an unknown call": (_chat({"role": "assistant", "content": "C", "tool_calls": [{"type": "mcp"}]}), "\nC<|im_end|>",
                        "messages[1].tool_calls[0].mcp"),
    "a tool that is no function": (_chat(tools=[{"type": "code_interpreter"}]), "hi", "tools[0].code_interpreter"),
    "a refusal": (_chat({"role": "assistant", "content": None, "refusal": "NO"}), "NO", ""),
    "a file in a result": (_chat(_called("{}"), {"role": "tool", "tool_call_id": "a", "content": [{"type": "file"}]}),
                           "[file omitted: this model reads text only]", "messages[2].content[0].file"),
    "input of null": (_claude(input=None), '"arguments": {}', ""),
    "input of text": (_claude(input="ls -l"), '"arguments": "ls -l"', ""),
    "input of a list": (_claude(input=["a"]), '"arguments": "[\\"a\\"]"', ""),
    "no input": (_claude(input=0), '"arguments": {}', ""),
    "a text document": (_claude({"type": "document", "source": {"type": "text", "data": "DATA"}}), "DATA", ""),
    "a document": (_claude({"type": "document", "source": {"type": "base64", "data": "eA=="}}),
                   "[document omitted: this model reads text only]", "messages[2].content[0].content[0].document"),
    "a tool reference": (_claude({"type": "tool_reference", "tool_name": "x"}), "[tool_reference omitted",
                         "messages[2].content[0].content[0].tool_reference"),
    "a user's document": (
        ("/v1/messages", {"messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "DATA"}}]}]}),
        "user\nDATA<|im_end|>", "",
    ),
    "a search result": (
        _claude({"type": "search_result", "source": "S", "title": "T", "content": [{"type": "text", "text": "F"}]}),
        '\n{"title": "T", "source": "S"}\nF\n', "",
    ),
    "a call of an MCP server": (
        _served({"type": "mcp_tool_use", "id": "m", "name": "look", "server_name": "s", "input": {"a": 1}},
                {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "FOUND"}]}),
        'A\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n<|im_start|>user\n'
        "<tool_response>\nFOUND\n</tool_response><|im_end|>\n<|im_start|>assistant\nB<|im_end|>",
        "",
    ),
    "code that ran": (
        _served({"type": "bash_code_execution_tool_result", "tool_use_id": "m", "content":
                 {"type": "bash_code_execution_result", "stdout": "OUT", "return_code": 1, "content": []}}),
        '\n{"stdout": "OUT", "return_code": 1}\n', "",
    ),
    "a fetched page": (
        _served({"type": "web_fetch_tool_result", "tool_use_id": "m", "content":
                 {"type": "web_fetch_result", "url": "U", "content":
                  {"type": "document", "source": {"type": "text", "data": "PAGE"}}}}),
        '\n{"url": "U"}\nPAGE\n', "",
    ),
    "an assistant's block with text": (_served({"type": "compaction", "content": "SUMMARY"}), "SUMMARY", ""),
    "an assistant's block without text": (_served({"type": "container_upload", "file_id": "f"}), "A\nB",
                                          "messages[1].content[1].container_upload"),
    "a result that is no block": (_claude("FOUND"), "FOUND", ""),
    "an item of a computer": (
        _items({"type": "computer_call", "call_id": "c", "action": {"type": "click"}},
               {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}),
        '{"name": "computer", "arguments": {"action": {"type": "click"}}}', "input[2].output[0].computer_screenshot",
    ),
    "output of a shell": (
        _items({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
               {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "OUT", "outcome": {}}]}),
        '\n{"stdout": "OUT", "outcome": {}}\n', "",
    ),
    "output of a local shell": (
        _items({"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec"}},
               {"type": "local_shell_call_output", "id": "c", "output": "OUT"}),
        "\nOUT\n", "",
    ),
    "output as an object": (_items({"type": "function_call_output", "call_id": "c", "output": {"success": True}}),
                            '\n{"success": true}\n', ""),
    "output and arguments of null": (
        _items({"type": "function_call", "call_id": "c", "name": "look", "arguments": None},
               {"type": "function_call_output", "call_id": "c", "output": None}),
        '"arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n\n</tool_response>', "",
    ),
    "an unknown item": (_items({"type": "mcp_list_tools", "id": "m"}), "hi", "input[1].mcp_list_tools"),
}  # fmt: skip


@pytest.mark.parametrize("case", _ODD)
async def test_odd_turn_does_not_end_the_session(serve: Serve, case: str) -> None:
    (path, body), shown, ignored = _ODD[case]
    for message in body.get("messages", ()) if case == "no input" else ():
        for block in message["content"] if isinstance(message["content"], list) else ():
            block.pop("input", None)
    served = await serve(chat_template=TEMPLATES["hermes_tools"], max_context=4096)
    limit = {"max_output_tokens": 1} if path == "/v1/responses" else {"max_tokens": 1}
    answer = await served.http.post(path, json=body | limit)
    assert answer.status_code == 200, answer.text
    assert shown in served.prompt
    assert answer.headers.get("x-ignored-fields", "") == ignored
