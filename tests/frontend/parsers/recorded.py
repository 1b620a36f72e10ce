"""Recorded answers of each model family, with the expected parse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "places": {"type": "array", "items": {"type": "string"}},
            "is_exact": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
    "write.file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Recorded:
    format: str
    raw: str
    calls: tuple[Call, ...]
    text: str = ""
    thinking: str = ""


_PARIS: Call = ("get_weather", {"city": "Paris", "days": 3})
_NOW: Call = ("now", {})
_TEXT = 'def f():\n    return "é \\ 🎉"\n'
_FILE: Call = ("write.file", {"path": "a.py", "text": _TEXT})


def _args(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


def _invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    """Write a call as DeepSeek V3.2 does. parameters: their names, whether they are strings, and values."""
    written = "".join(
        f'<｜DSML｜parameter name="{key}" string="{is_string}">{value}</｜DSML｜parameter>\n'  # noqa: RUF001
        for key, is_string, value in parameters
    )
    return f'<｜DSML｜invoke name="{name}">\n{written}</｜DSML｜invoke>\n'  # noqa: RUF001


RECORDED = [
    Recorded(
        "generic",
        '[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"arguments": {}, "name": "now"}]',
        (_PARIS, _NOW),
    ),
    Recorded(
        "generic",
        'I look: 🎉\n\n```json\n[\n  {\n    "name": "get_weather",\n    "arguments": {"city": "Paris", "days": 3}\n  },'
        '\n  {"name": "now"}\n]\n```\n{"name": "now", "parameters": {}}\n Done.',
        (_PARIS, _NOW, _NOW),
        "I look: 🎉\n Done.",
    ),
    Recorded("generic", '```\n{"name": "now", "arguments": {}}\n```', (_NOW,)),
    Recorded("generic", '{"name": "now"}{"name": "unknown"}', (_NOW,), '{"name": "unknown"}'),
    *(  # JSON of another kind, and calls inside it
        Recorded("generic", raw, (), "=")
        for raw in (
            '{"plan": [{"name": "now", "arguments": {}}]}\n',
            '[\n  [{"name": "now", "arguments": {}}]\n]\n[1]\n',
            'See\n```json\n[```\n[{"name": "unknown"}]\n```\nSay [{"name": "now"}]',
            "```python\n[1]\n``` \n\n `{`",
        )
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        (_PARIS,),
    ),
    Recorded(
        "hermes",
        "Let me look. 🎉\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {}, "name": "now"}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>\n',
        (_PARIS, _NOW, _NOW),
        "Let me look. 🎉",
    ),
    Recorded(
        "hermes",
        '<tool_call>{"name": "write.file", "arguments": {"path": "a.py", "text": '
        '"def f():\\n    return \\"\\u00e9 \\\\ \\ud83c\\udf89\\"\\n"}}</tool_call> Done.',
        (_FILE,),
        " Done.",
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}\n</tool_call>',
        (_PARIS,),
    ),
    Recorded("hermes", 'No call: <tool_call> is how one begins, {"name": "now"} what is in it.', (), "="),
    Recorded("hermes", '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>', (), "="),
    Recorded("hermes", '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>', (), "="),
    Recorded("hermes", '<tool_call>\n{"name": "now", "argum', (), "="),
    Recorded("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', (_NOW,), "<tool_call>"),
    Recorded("hermes", "  \n", (), "="),
    Recorded("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', (_PARIS,)),
    Recorded(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        (_NOW, _PARIS),
    ),
    Recorded("llama3_json", '{"answer": 42, "name": "now"}', (), "="),
    Recorded("llama3_json", '<|python_tag|>brave_search.call(query="x")', (), "="),
    Recorded("llama3_json", "Call {} now.", (), "="),
    Recorded(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        (_PARIS, _NOW),
    ),
    Recorded(
        "mistral",
        'Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}',
        (_PARIS, _NOW),
        "Well.",
    ),
    Recorded("mistral", "[TOOL_CALLS] [1, 2]", (), "="),
    Recorded("mistral", "[TOOL_CALLS]nothing of the kind", (), "="),
    Recorded(
        "deepseek_v3",
        "I see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"  # noqa: RUF001
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'  # noqa: RUF001
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        (_PARIS, _NOW),
        "I see.",
    ),
    Recorded(
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'  # noqa: RUF001
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        (_PARIS, _NOW),
    ),
    Recorded("deepseek_v3", "<｜tool▁calls▁begin｜> and nothing", (), "="),  # noqa: RUF001
    Recorded(
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (_PARIS, _NOW),
        "Sure.",
    ),
    Recorded(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n3\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
        '<parameter=places>\n["a", "b"]\n</parameter>\n<parameter=is_exact>True</parameter><parameter=days>\nmany\n'
        "</parameter></function>",
        (("get_weather", {"city": "3", "units": None, "places": ["a", "b"], "is_exact": True, "days": "many"}),),
    ),
    Recorded(
        "qwen3_coder",
        "<tool_call>\n<function=write.file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
        'def f():\n    return "é \\ 🎉"\n\n</parameter>\n</function>\n</tool_call>',
        (_FILE,),
    ),
    Recorded("qwen3_coder", "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>", (_NOW,)),
    Recorded("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>", (), "="),
    Recorded("pythonic", '[get_weather(city="Paris", days=3), now()]', (_PARIS, _NOW)),
    Recorded(
        "llama4_pythonic",
        "Well. <|python_start|>[get_weather(city='Par)is', places=['a', \"b]\"], is_exact=true)]<|python_end|>",
        (("get_weather", {"city": "Par)is", "places": ["a", "b]"], "is_exact": True}),),
        "Well.",
    ),
    Recorded("pythonic", "[1, 2, 3] is a list, and [now] is one.", (), "="),
    Recorded("pythonic", '[get_weather("Paris")]', (), "="),
    Recorded("pythonic", "[get_weather(city=open('x'))]", (), "="),
    Recorded(
        "llama4_pythonic",
        '<|python_start|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}<|python_end|>',
        (_NOW, _PARIS),
    ),
    Recorded("llama4_pythonic", '{"name": "now", "parameters": {}}', (_NOW,)),
    Recorded("llama4_pythonic", '<|python_start|>{"now": [now()]}', (), "="),
    Recorded(
        "glm45",
        "I see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        (_PARIS, _NOW),
        "I see.",
    ),
    Recorded(
        "glm45",
        f"<tool_call>write.file\n{_args('path', 'a.py')}{_args('text', _TEXT)}</tool_call> Done.",
        (_FILE,),
        " Done.",
    ),
    Recorded("glm45", "<tool_call>no_such_tool\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", (), "="),
    Recorded("glm45", "<tool_call>get_weather\n<arg_value>Paris</arg_value>\n</tool_call>", (), "="),
    Recorded(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
        (_PARIS, _NOW),
    ),
    Recorded(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>\n </arg_key><tool_call>now</tool_call></arg_value>"
        '<arg_key>units</arg_key><arg_value>null</arg_value><arg_key>places</arg_key><arg_value>["a", "b"]</arg_value>'
        "<arg_key>is_exact</arg_key><arg_value>True</arg_value></tool_call>",
        (
            (
                "get_weather",
                {
                    "city": "\n </arg_key><tool_call>now</tool_call>",
                    "units": None,
                    "places": ["a", "b"],
                    "is_exact": True,
                },
            ),
        ),
    ),
    Recorded(
        "kimi_k2",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        (_PARIS, _NOW),
        "Sure.",
    ),
    Recorded(
        "kimi_k2",
        "<|tool_call_begin|> write.file:12 <|tool_call_argument_begin|>"
        '{"text": "<|tool_call_end|>"}<|tool_calls_section_end|>',
        (("write.file", {"text": "<|tool_call_end|>"}),),
    ),
    Recorded("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>", (), "="),
    Recorded(
        "kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', (), "="
    ),
    Recorded(
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        (_PARIS, _NOW),
        "I look.",
    ),
    Recorded(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="write.file">\n<parameter name="path">a.py</parameter>\n'
        f'<parameter name="text">{_TEXT}</parameter>\n</invoke>\n</minimax:tool_call>',
        (_FILE,),
    ),
    Recorded("minimax_m2", '<invoke name="now">\n<parameter name="a">1</parameter>\n</minimax:tool_call>', (), "="),
    Recorded(
        "deepseek_v32",
        "I see.\n\n<｜DSML｜function_calls>\n"  # noqa: RUF001
        + _invoke("get_weather", ("city", "true", "Paris"), ("days", "false", "3"))
        + _invoke("now")
        + "</｜DSML｜function_calls>",  # noqa: RUF001
        (_PARIS, _NOW),
        "I see.",
    ),
    Recorded(
        "deepseek_v32",
        "<｜DSML｜tool_calls>\n"  # noqa: RUF001
        + _invoke("get_weather", ("days", "true", "3"), ("more", "false", '{"a": [1]}'), ("none", "false", "as is"))
        + _invoke("write.file", ("text", "true", _TEXT)),
        (
            ("get_weather", {"days": "3", "more": {"a": [1]}, "none": "as is"}),
            ("write.file", {"text": _TEXT}),
        ),
    ),
    Recorded("deepseek_v32", _invoke("f", ("a", "true", "1")), (), "="),
    Recorded(
        "gemma4",
        'Well.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
        (_PARIS, _NOW),
        "Well.",
    ),
    Recorded(
        "gemma4", f'<|tool_call>call:write.file{{path:<|"|>a.py<|"|>,text:<|"|>{_TEXT}<|"|>}}<tool_call|>', (_FILE,)
    ),
    Recorded(
        "gemma4",
        '<|tool_call>call:get_weather{places:[<|"|>a<|"|>,<|"|>}<tool_call|><|"|>],more:{a:[],b:{c:-1.5},<|"|>d:e<|"|>:{}}'
        ", units : None ,is_exact:true,city:Rome}",
        (
            (
                "get_weather",
                {
                    "places": ["a", "}<tool_call|>"],
                    "more": {"a": [], "b": {"c": -1.5}, "d:e": {}},
                    "units": None,
                    "is_exact": True,
                    "city": "Rome",
                },
            ),
        ),
    ),
    Recorded("gemma4", "<|tool_call>call:now{city}<tool_call|> or a:b}", (), "="),
    Recorded("gemma4", "<|tool_call>call:now{city:Paris<tool_call|> or}", (), "="),
    Recorded("gemma4", "<|tool_call>call:f{a:1}<tool_call|>", (), "="),
    Recorded("forced_call", ' {"a": [1, {}]}\n', (("now", {"a": [1, {}]}),)),
    Recorded("forced_call", "no", (), "="),
    Recorded(
        "forced_calls",
        '[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        (_NOW, _PARIS),
    ),
    Recorded(
        "openai",
        "<|channel|>analysis<|message|>Which city? 🎉\n<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>',
        (_PARIS,),
        thinking="Which city? 🎉",
    ),
    Recorded(
        "openai",
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 3}'
        "<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Sunny.<|return|>",
        (_PARIS,),
        "Let me look.\n\nSunny.",
        "Hm.\n\nSo.",
    ),
    Recorded(
        "openai",
        ' to=functions.write.file code<|message|>{"path": "a.py", "text": "def f():\\n    return \\"é \\\\ 🎉\\"\\n"}',
        (_FILE,),
    ),
    Recorded("openai", "<|channel|>final <|constrain|>json<|message|>[1, 2] <|end|>", (), "[1, 2]"),
    Recorded("openai", "<|channel|>analysis to=python code<|message|>print(1)<|end|>", (), "", "print(1)"),
    Recorded("openai", "<|channel|>commentary to=functions.no_such_tool json<|message|>{}", (), "="),
    Recorded("openai", "<|channel|>commentary to=functions.now json<|message|>no JSON", (), "="),
    Recorded(
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.no_such_tool<|message|>{}",
        (),
        "<|end|><|start|>assistant to=functions.no_such_tool<|message|>{}",
        "Hm.",
    ),
    Recorded("openai", "<|channel|>final and no message", (), "="),
    Recorded("openai", "No channel: to=functions.now is how a call begins.", (), "="),
    Recorded("openai", "<|channel|>analysis<|message|>cut o", (), "", "cut o"),
]
