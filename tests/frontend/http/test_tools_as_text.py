"""Tools for a model whose chat template has no form for them, with the clients of all APIs, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any

import pytest

from core.types.request import GrammarKind
from frontend.chat.history import tools_as_text
from frontend.chat.output_format import OutputFormat
from tests.support.serving import TEMPLATES, Serve, Served
from tests.support.tiny_tokenizers import CHATML
from tests.support.tool_clients import ASKS, SCHEMA, Ask

_LLAMA2 = TEMPLATES["llama2"]
_TOOLS = tools_as_text([{"function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}])
_PARIS, _ROME = ({"city": city, "days": 3} for city in ("Paris 🎉", "Rome"))
_CALL, _OTHER = (
    f'{{"name": "weather", "arguments": {json.dumps(one, ensure_ascii=False)}}}' for one in (_PARIS, _ROME)
)
_ENDS = {"chat": ("tool_calls", "stop"), "messages": ("tool_use", "end_turn"), "responses": ("completed", "completed")}


@pytest.fixture
def serve_text(serve: Serve) -> Serve:
    def opened(template: str = CHATML) -> Awaitable[Served]:
        return serve(chat_template=template, max_context=4096, has_grammars=True)

    return opened


_every_api = pytest.mark.parametrize("api", ASKS)
_streamed = pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])


@_every_api
@_streamed
async def test_agent_turns(serve_text: Serve, api: str, streams: bool) -> None:
    """The model sees tools, its calls and their results in the roles that its template knows."""
    ask: Ask = ASKS[api]
    served = await serve_text()
    served.say(f"Let me look.\n```json\n[{_CALL}, {_OTHER}]\n```\n")
    said = await ask(served.url, streams=streams, max_tokens=200)
    assert (said.text, said.calls, said.end) == (
        "Let me look.", [("weather", _PARIS), ("weather", _ROME)], _ENDS[api][0]
    )  # fmt: skip
    served.say("It [1] is {sunny}.")
    again = await ask(served.url, said.turns, streams=streams)
    assert (again.text, again.calls, again.end) == ("It [1] is {sunny}.", [], _ENDS[api][1])
    blocks = [tuple(one.split("<|im_end|>")[0].split("\n", 1)) for one in served.prompt.split("<|im_start|>")[1:]]
    assert blocks == [
        ("system", f"Be brief.\n\n{_TOOLS}"),
        ("user", "hi"),
        ("assistant", f"Let me look.\n\n[{_CALL}, {_OTHER}]"),
        ("user", "Result of weather:\nresult 0"),
        ("user", "Result of weather:\nresult 1"),
        ("assistant", ""),
    ]


@_every_api
async def test_agent_turns_with_a_strict_template(serve_text: Serve, api: str) -> None:
    """The template raises for other roles than user and assistant, and unless they alternate."""
    served = await serve_text(_LLAMA2)
    served.say(_CALL)
    said = await ASKS[api](served.url)
    assert said.calls == [("weather", _PARIS)]
    served.say("Sunny.")
    assert (await ASKS[api](served.url, said.turns)).text == "Sunny."
    assert f"hi [/INST]\n [{_CALL}] <|im_end|><|im_start|>[INST] Result of weather:\nresult 0 [/INST]" in served.prompt
    assert served.prompt.startswith(f"<|im_start|>[INST] <<SYS>>\nBe brief.\n\n{_TOOLS}\n<</SYS>>")


@_every_api
@_streamed
async def test_tool_choice(serve_text: Serve, api: str, streams: bool) -> None:
    ask: Ask = ASKS[api]
    served = await serve_text()
    served.say(f"[{_CALL}]")
    hidden = await ask(served.url, choice="none", streams=streams)
    assert (hidden.text, hidden.calls) == (f"[{_CALL}]", []) and "weather" not in served.prompt
    served.say(f"[{_CALL}, {_OTHER}] more")
    one = await ask(served.url, is_parallel=False, streams=streams, max_tokens=200)
    assert (one.text, one.calls) == ("", [("weather", _PARIS)]) and served.fake.stopped
    for is_strict in (False, True):
        for choice, text in (("required", f"[{_CALL}]"), ("weather", json.dumps(_PARIS, ensure_ascii=False))):
            served.say(text)
            said = await ask(served.url, choice=choice, is_strict=is_strict, streams=streams)
            assert (said.text, said.calls, said.end) == ("", [("weather", _PARIS)], _ENDS[api][0])
            grammar = served.fake.started[-1].grammar
            assert grammar and grammar.kind is (
                GrammarKind.JSON_SCHEMA if is_strict else GrammarKind.LENIENT_JSON_SCHEMA
            )
            assert _TOOLS in served.prompt


async def test_format_set_by_the_operator(serve_text: Serve) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 64}
    template = CHATML + "{{ tools }}<tool_call>"
    served = await serve_text(template)
    served.say(f"[{_CALL}]")
    for parser, error in (
        ("generic", ""),
        ("none", "tools: turned off for this model; the operator can set model.tool_parser to auto"),
    ):
        served.service.prompts.output_format = OutputFormat.of(template, tool_parser=parser)
        answer = await served.http.post("/v1/chat/completions", json=body)
        if error:
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, error)
        else:
            assert answer.json()["choices"][0]["message"]["tool_calls"] and _TOOLS in served.prompt
            assert served.prompt.endswith("None<tool_call>"), "the template does not show the tools as well"
    served = await serve_text()
    served.service.prompts.output_format = OutputFormat.of(CHATML, tool_parser="hermes")
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "model.tool_parser to generic" in answer.json()["error"]["message"]


async def test_tools_with_a_response_format(serve_text: Serve) -> None:
    """The answer is a call or JSON of the schema, and JSON that holds calls is no call."""
    plan = {"type": "object", "properties": {"plan": {"type": "array"}}, "required": ["plan"]}
    form = {"type": "json_schema", "json_schema": {"name": "plan", "schema": plan}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "response_format": form}
    served = await serve_text()
    for text, is_call in ((f"[{_CALL}]", True), (f'{{"plan": [{_CALL}]}}', False)):
        served.say(text)
        answer = await served.http.post("/v1/chat/completions", json={**body, "max_tokens": 100})
        message = answer.json()["choices"][0]["message"]
        assert bool(message.get("tool_calls")) is is_call and message["content"] == (None if is_call else text)
    grammar = served.fake.started[-1].grammar
    assert grammar and grammar.kind is GrammarKind.LARK and "call0" in grammar.text
