"""Recorded answers of each model family, with the expected parse."""

# ruff: noqa: RUF001

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
        f'<｜DSML｜parameter name="{key}" string="{is_string}">{value}</｜DSML｜parameter>\n'
        for key, is_string, value in parameters
    )
    return f'<｜DSML｜invoke name="{name}">\n{written}</｜DSML｜invoke>\n'


# By format: the answer, its calls, its text ("=": the whole answer), and its thinking.
_ANSWERS: dict[str, list[tuple[Any, ...]]] = {
    "generic": [
        ('[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"arguments": {}, "name": "now"}]',
         (_PARIS, _NOW)),
        ('I look: 🎉\n\n```json\n[\n  {\n    "name": "get_weather",\n    "arguments": {"city": "Paris", "days": 3}\n  }'
         ',\n  {"name": "now"}\n]\n```\n{"name": "now", "parameters": {}}\n Done.',
         (_PARIS, _NOW, _NOW), "I look: 🎉\n Done."),
        ('```\n{"name": "now", "arguments": {}}\n```', (_NOW,)),
        ('{"name": "now"}{"name": "unknown"}', (_NOW,), '{"name": "unknown"}'),
        ('{"plan": [{"name": "now", "arguments": {}}]}\n', (), "="),
        ('[\n  [{"name": "now", "arguments": {}}]\n]\n[1]\n', (), "="),
        ('See\n```json\n[```\n[{"name": "unknown"}]\n```\nSay [{"name": "now"}]', (), "="),
        ("```python\n[1]\n``` \n\n `{`", (), "="),
    ],
    "hermes": [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>', (_PARIS,)),
        ("Let me look. 🎉\n\n<tool_call>\n"
         '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n<tool_call>\n'
         '{"arguments": {}, "name": "now"}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>\n',
         (_PARIS, _NOW, _NOW), "Let me look. 🎉"),
        ('<tool_call>{"name": "write.file", "arguments": {"path": "a.py", "text": '
         '"def f():\\n    return \\"\\u00e9 \\\\ \\ud83c\\udf89\\"\\n"}}</tool_call> Done.', (_FILE,), " Done."),
        ('<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}\n</tool_call>',
         (_PARIS,)),
        ('<tool_call>{"name": "write.file", "arguments": {"path": "a.py", "text": '
         '"def f():\n    return \\"é \\\\ 🎉\\"\n"}}</tool_call>', (_FILE,)),
        ('<tool_call>{"name": "write.file", "arguments": {"text": "it\\\'s\\ta \\d\\\n\x01"}}</tool_call>',
         (("write.file", {"text": "it's\ta \\d\n\x01"}),)),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, }}</tool_call>\n'
         '<tool_call>{"name": "write.file", "arguments": {"a": [True, {"b": None,},], "c": False}}</tool_call>',
         (_PARIS, ("write.file", {"a": [True, {"b": None}], "c": False}))),
        ('<tool_call>\n{"name": "now", "arguments": ""}\n{"name": "get_weather", "arguments": {"city": "Paris", '
         '"days": 3}}\n</tool_call>', (_NOW, _PARIS)),
        ('<tool_call>{"name": "now"}\n{"name": "unknown"}</tool_call>', (_NOW,), '\n{"name": "unknown"}</tool_call>'),
        ('No call: <tool_call> is how one begins, {"name": "now"} what is in it.', (), "="),
        ('<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>', (), "="),
        ('<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>', (), "="),
        ('<tool_call>\n{"name": "now", "argum', (), "="),
        ('<tool_call><tool_call>{"name": "now"}</tool_call>', (_NOW,), "<tool_call>"),
        ("  \n", (), "="),
    ],
    "llama3_json": [
        ('{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', (_PARIS,)),
        ('<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
         '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', (_NOW, _PARIS)),
        ('{"name": "now", "parameters": {}}\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
         (_NOW, _PARIS)),
        ('{"name": "now", "parameters": {}}\n{"name": "unknown"}', (_NOW,), '\n{"name": "unknown"}'),
        ('{"name": "now", "parameters": {}}; {not json', (_NOW,), "; {not json"),
        ('{"answer": 42, "name": "now"}', (), "="),
        ('<|python_tag|>brave_search.call(query="x")', (), "="),
        ("Call {} now.", (), "="),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
         '{"name": "now", "arguments": {}, "id": "abcdefghi"}]', (_PARIS, _NOW)),
        ('Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}',
         (_PARIS, _NOW), "Well."),
        ('[TOOL_CALLS]{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', (_PARIS,)),
        ("[TOOL_CALLS] [1, 2]", (), "="),
        ("[TOOL_CALLS]nothing of the kind", (), "="),
    ],
    "deepseek_v3": [
        ("I see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
         '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         (_PARIS, _NOW), "I see."),
        ("<｜tool▁calls▁begin｜> and nothing", (), "="),
    ],
    "deepseek_v31": [
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
         "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         (_PARIS, _NOW)),
    ],
    "qwen3_coder": [
        ("Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
         "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
         (_PARIS, _NOW), "Sure."),
        ("<function=get_weather>\n<parameter=city>\n3\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
         '<parameter=places>\n["a", "b"]\n</parameter>\n<parameter=is_exact>True</parameter><parameter=days>\nmany\n'
         "</parameter></function>",
         (("get_weather", {"city": "3", "units": None, "places": ["a", "b"], "is_exact": True, "days": "many"}),)),
        ("<tool_call>\n<function=write.file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
         'def f():\n    return "é \\ 🎉"\n\n</parameter>\n</function>\n</tool_call>', (_FILE,)),
        ("<function=get_weather>\n<parameter=places>\n['a', \"it's\", r'\\d',]\n</parameter>\n<parameter=days>\n"
         "[1\n</parameter>\n</function>", (("get_weather", {"places": ["a", "it's", "\\d"], "days": "[1"}),)),
        # A value that has the tags themselves, as of an agent that edits this file.
        ("<function=write.file>\n<parameter=path>\na </parameter> b <parameter=b> b\n</function> c\n<parameter=no>\n"
         "</tool_call>\n</parameter>\n<parameter=text>\n</parameter>.\n</parameter>\n</function>\n</tool_call>",
         (("write.file", {"path": "a </parameter> b <parameter=b> b\n</function> c\n<parameter=no>\n</tool_call>",
          "text": "</parameter>."}),)),
        # Without some of the closing tags.
        ("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n</tool_call>\n"
         "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
         "</tool_call>", (_PARIS, _PARIS)),
        ("<function=get_weather>\n<parameter=days>\n3\n<parameter=city>\nParis\n</parameter>\n", (_PARIS,)),
        ("<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>", (_NOW,)),
        ("<tool_call>\n<function=unknown>\n</function>\n</tool_call>", (), "="),
    ],
    "pythonic": [
        ('[get_weather(city="Paris", days=3), now()]', (_PARIS, _NOW)),
        ("[1, 2, 3] is a list, and [now] is one.", (), "="),
        ('[get_weather("Paris")]', (), "="),
        ("[get_weather(city=open('x'))]", (), "="),
    ],
    "llama4_pythonic": [
        ("Well. <|python_start|>[get_weather(city='Par)is', places=['a', \"b]\"], is_exact=true)]<|python_end|>",
         (("get_weather", {"city": "Par)is", "places": ["a", "b]"], "is_exact": True}),), "Well."),
        ('<|python_start|>{"type": "function", "name": "now", "parameters": {}}; '
         '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}<|python_end|>', (_NOW, _PARIS)),
        ('{"name": "now", "parameters": {}}', (_NOW,)),
        ('<|python_start|>{"now": [now()]}', (), "="),
    ],
    "glm45": [
        ("I see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
         "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
         (_PARIS, _NOW), "I see."),
        (f"<tool_call>write.file\n{_args('path', 'a.py')}{_args('text', _TEXT)}</tool_call> Done.", (_FILE,), " Done."),
        ("<tool_call>no_such_tool\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", (), "="),
        ("<tool_call>get_weather\n<arg_value>Paris</arg_value>\n</tool_call>", (), "="),
    ],
    "glm47": [
        ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
         "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>", (_PARIS, _NOW)),
        ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>\n </arg_key><tool_call>now</tool_call></arg_value>"
         '<arg_key>units</arg_key><arg_value>null</arg_value><arg_key>places</arg_key><arg_value>["a", "b"]</arg_value>'
         "<arg_key>is_exact</arg_key><arg_value>True</arg_value></tool_call>",
         (("get_weather", {"city": "\n </arg_key><tool_call>now</tool_call>", "units": None, "places": ["a", "b"],
         "is_exact": True},),)),
    ],
    "kimi_k2": [
        ("Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
         '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
         "<|tool_call_end|><|tool_calls_section_end|>", (_PARIS, _NOW), "Sure."),
        ("<|tool_call_begin|> write.file:12 <|tool_call_argument_begin|>"
         '{"text": "<|tool_call_end|>"}<|tool_calls_section_end|>', (("write.file", {"text": "<|tool_call_end|>"}),)),
        ("<|tool_calls_section_begin|><|tool_calls_section_end|>", (), "="),
        ('<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', (), "="),
    ],
    "minimax_m2": [
        ('I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
         '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
         (_PARIS, _NOW), "I look."),
        ('<minimax:tool_call>\n<invoke name="write.file">\n<parameter name="path">a.py</parameter>\n'
         f'<parameter name="text">{_TEXT}</parameter>\n</invoke>\n</minimax:tool_call>', (_FILE,)),
        ('<invoke name="now">\n<parameter name="a">1</parameter>\n</minimax:tool_call>', (("now", {"a": "1"}),)),
        ('<invoke name="now">\n</minimax:tool_call>', (), "="),
    ],
    "deepseek_v32": [
        ("I see.\n\n<｜DSML｜function_calls>\n"
         + _invoke("get_weather", ("city", "true", "Paris"), ("days", "false", "3"))
         + _invoke("now")
         + "</｜DSML｜function_calls>", (_PARIS, _NOW), "I see."),
        ("<｜DSML｜tool_calls>\n"
         + _invoke("get_weather", ("days", "true", "3"), ("more", "false", '{"a": [1]}'), ("none", "false", "as is"))
         + _invoke("write.file", ("text", "true", _TEXT)),
         (("get_weather", {"days": "3", "more": {"a": [1]}, "none": "as is"}), ("write.file", {"text": _TEXT}),)),
        (_invoke("f", ("a", "true", "1")), (), "="),
    ],
    "gemma4": [
        ('Well.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
         (_PARIS, _NOW), "Well."),
        (f'<|tool_call>call:write.file{{path:<|"|>a.py<|"|>,text:<|"|>{_TEXT}<|"|>}}<tool_call|>', (_FILE,)),
        ('<|tool_call>call:get_weather{places:[<|"|>a<|"|>,<|"|>}<tool_call|><|"|>],more:{a:[],b:{c:-1.5},<|"|>d:e<|"|>:{}}'
         ", units : None ,is_exact:true,city:Rome}",
         (("get_weather", {"places": ["a", "}<tool_call|>"], "more": {"a": [], "b": {"c": -1.5}, "d:e": {}},
         "units": None, "is_exact": True, "city": "Rome"},),)),
        ("<|tool_call>call:now{city}<tool_call|> or a:b}", (), "="),
        ("<|tool_call>call:now{city:Paris<tool_call|> or}", (), "="),
        ("<|tool_call>call:f{a:1}<tool_call|>", (), "="),
    ],
    "forced_call": [
        (' {"a": [1, {}]}\n', (("now", {"a": [1, {}]}),)),
        ("no", (), "="),
    ],
    "forced_calls": [
        ('[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
         (_NOW, _PARIS)),
    ],
    "openai": [
        ("<|channel|>analysis<|message|>Which city? 🎉\n<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>',
         (_PARIS,), "", "Which city? 🎉"),
        ("<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
         '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 3}'
         "<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>"
         "Sunny.<|return|>", (_PARIS,), "Let me look.\n\nSunny.", "Hm.\n\nSo."),
        (' to=functions.write.file code<|message|>{"path": "a.py", "text": "def f():\\n    return \\"é \\\\ 🎉\\"\\n"}',
         (_FILE,)),
        ("<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", (_NOW,)),
        ("<|channel|>commentary to=functions.now<|message|>", (_NOW,)),
        ("<|channel|>final <|constrain|>json<|message|>[1, 2] <|end|>", (), "[1, 2]"),
        ("<|channel|>analysis to=python code<|message|>print(1)<|end|>", (), "", "print(1)"),
        ("<|channel|>commentary to=functions.no_such_tool json<|message|>{}", (), "="),
        ("<|channel|>commentary to=functions.now json<|message|>no JSON", (), "="),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.no_such_tool<|message|>{}",
         (), "<|end|><|start|>assistant to=functions.no_such_tool<|message|>{}", "Hm."),
        ("<|channel|>final and no message", (), "="),
        ("No channel: to=functions.now is how a call begins.", (), "="),
        ("<|channel|>analysis<|message|>cut o", (), "", "cut o"),
    ],
}  # fmt: skip
RECORDED = [Recorded(format, *answer) for format, answers in _ANSWERS.items() for answer in answers]
