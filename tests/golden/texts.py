"""Text records of the public surface for clients and operators: sorted, one fact per line.

Prose has its own records, so that a rewording does not hide a changed fact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from tests.golden import product

_WIDTH = 100
_PROSE = {"description", "summary", "title"}
_KEY_PATTERN = re.compile(r"""f"\{(?:self\.)?_?name\}:(?=[a-z{])([a-z0-9:{}\[\]().,_ ]+)" """.strip())
_CELL = re.compile(r"(?<!\\)\|")


def openapi() -> str:
    return _lines(line for line in _flat(product.openapi_document()) if not _is_prose(line))


def openapi_prose() -> str:
    return _lines(line for line in _flat(product.openapi_document()) if _is_prose(line))


def spec() -> str:
    """Keys, types, bounds and defaults: the JSON schema with resolved references."""
    schema = product.Spec.model_json_schema()
    return _lines(_spec_lines("", schema, schema["$defs"]))


def protos() -> str:
    return _lines(line for module in product.PROTOS for line in _proto_lines(module.DESCRIPTOR))


def cli() -> str:
    """Commands, arguments, options, types, defaults and environment variables."""
    return _lines(line for path, command, _ in _commands() for line in _command_lines(path, command))


def help_texts() -> str:
    return "\n".join(f"=== {path} --help\n{context.get_help()}\n" for path, _, context in _commands())


def errors() -> str:
    """Each error class: base, gRPC status, HTTP status, OpenAI's `type` and `code`, and the CLI's exit code."""
    rows = []
    for kind in _below(product.errors.ClusterError):
        error = _raised(kind)
        outcome, exit_code = product.errors.outcome_of(error), getattr(error, "exit_code", 2)
        rows.append(
            f"{kind.__name__}({kind.__base__.__name__}): grpc {outcome.grpc}, http {outcome.http}, "
            f"type {outcome.type}, code {outcome.code}, exit {exit_code}"
        )
    other = product.errors.outcome_of(Exception())
    return _lines([*rows, f"any other: grpc {other.grpc}, http {other.http}, type {other.type}, code {other.code}"])


def faults() -> str:
    return _documented_tests("FAULTS.md")


def security() -> str:
    return _documented_tests("SECURITY.md")


def metrics() -> str:
    return _lines(f"{name}: {kind}, labels {list(labels)}" for name, kind, labels, _ in product.metric_families())


def metrics_prose() -> str:
    return _lines(f"{name}: {meaning}" for name, _, _, meaning in product.metric_families())


def redis_keys() -> str:
    """Patterns of Redis keys, collected from the source. `NAME` is the deployment's name."""
    found = set()
    for package in product.PACKAGES:
        for path in (product.ROOT / package).rglob("*.py"):
            found |= {re.sub(r"\{[^}]*\}", "{}", match[1]) for match in _KEY_PATTERN.finditer(path.read_text())}
    return _lines(f"NAME:{pattern}" for pattern in found if " " not in pattern)


TEXTS: dict[str, Callable[[], str]] = {
    "cli": cli,
    "errors": errors,
    "faults": faults,
    "help": help_texts,
    "metrics": metrics,
    "metrics_prose": metrics_prose,
    "openapi": openapi,
    "openapi_prose": openapi_prose,
    "protos": protos,
    "redis_keys": redis_keys,
    "security": security,
    "spec": spec,
}


def _lines(lines: Any) -> str:
    return "\n".join(sorted(lines)) + "\n"


def _flat(tree: Any, path: str = "") -> Iterator[str]:
    """Yield `a.b[0]: value` for every leaf of a JSON document."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{path} > {key}" if path else key)
    elif isinstance(tree, list) and any(isinstance(one, dict | list) for one in tree):
        for number, value in enumerate(tree):
            yield from _flat(value, f"{path}[{number}]")
    else:
        yield f"{path}: {tree!r}"


def _is_prose(line: str) -> bool:
    return line.partition(": ")[0].rpartition(" > ")[2] in _PROSE


def _spec_lines(path: str, field: dict[str, Any], kinds: dict[str, Any]) -> Iterator[str]:
    section = _section(field, kinds)
    if section is None:
        facts = {key: value for key, value in field.items() if key not in _PROSE and key != "default"}
        yield f"{path}: default {field.get('default', '(none: required)')!r}, {_compact(facts)}"
        return
    for key, inner in section["properties"].items():
        yield from _spec_lines(f"{path}.{key}" if path else key, inner, kinds)


def _section(field: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any] | None:
    for one in (field, *field.get("anyOf", ())):
        if "$ref" in one:
            return kinds[one["$ref"].rpartition("/")[2]]
    return field if "properties" in field else None


def _compact(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value!r}" for key, value in sorted(facts.items()))


def _proto_lines(file: Any) -> Iterator[str]:
    for message in file.message_types_by_name.values():
        yield from _message_lines(message)
    for enum in file.enum_types_by_name.values():
        yield from (f"enum {enum.full_name}: {value.number} {value.name}" for value in enum.values)
    for service in file.services_by_name.values():
        for method in service.methods:
            request, response = (
                f"{'stream ' * streams}{kind.full_name}"
                for streams, kind in (
                    (method.client_streaming, method.input_type),
                    (method.server_streaming, method.output_type),
                )
            )
            yield f"service {service.full_name}: {method.name}({request}) -> {response}"


def _message_lines(message: Any) -> Iterator[str]:
    from google.protobuf import descriptor_pb2

    message_proto = descriptor_pb2.DescriptorProto()
    message.CopyToProto(message_proto)
    yield f"message {message.full_name}"
    for field in message_proto.field:
        kind = field.type_name.removeprefix(".") or field.Type.Name(field.type).removeprefix("TYPE_").lower()
        label = "repeated " if field.label == field.LABEL_REPEATED else "optional " if field.proto3_optional else ""
        oneof = message.fields_by_name[field.name].containing_oneof
        within = f", in oneof {oneof.name}" if oneof and not field.proto3_optional else ""
        yield f"message {message.full_name}: {field.number:4} {field.name}: {label}{kind}{within}"
    yield from (
        f"message {message.full_name}: reserved {one.start} to {one.end - 1}" for one in message_proto.reserved_range
    )
    for inner in message.nested_types:
        yield from _message_lines(inner)
    for enum in message.enum_types:
        yield from (f"enum {enum.full_name}: {value.number} {value.name}" for value in enum.values)


def _commands() -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, command, context) of every command and group."""

    def walk(name: str, command: Any, parent: Any) -> Iterator[tuple[str, Any, Any]]:
        context = command.context_class(
            command, info_name=name, parent=parent, terminal_width=_WIDTH, max_content_width=_WIDTH
        )
        yield context.command_path, command, context
        for inner, one in sorted(getattr(command, "commands", {}).items()):
            yield from walk(inner, one, context)

    yield from walk("cluster", product.command_tree(), None)


def _command_lines(path: str, command: Any) -> Iterator[str]:
    yield f"{path}"
    for param in command.params:
        names = "/".join((*param.opts, *param.secondary_opts))
        kind = _kind(param.type_descriptor.annotation)
        bounds = [f"{end} {value}" for end in ("min", "max") if (value := getattr(param, end, None)) is not None]
        default = "" if callable(param.default) or "UNSET" in repr(param.default).upper() else repr(param.default)
        facts = [
            *([f"default {default}"] if default not in ("", "None") else ()),
            *(["required"] if param.required else ()),
            *(["repeated"] if getattr(param, "multiple", False) or param.nargs == -1 else ()),
            *([f"env {param.envvar}"] if param.envvar else ()),
        ]
        yield f"{path}: {param.param_type_name} {names} ({', '.join([kind, *bounds, *facts])})"


def _kind(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(one.value) for one in annotation)
    return getattr(annotation, "__name__", str(annotation)) if isinstance(annotation, type) else str(annotation)


def _below(kind: type) -> Iterator[type]:
    yield kind
    for one in kind.__subclasses__():
        if one.__module__ == product.errors.__name__:
            yield from _below(one)


def _raised(kind: type) -> BaseException:
    try:
        return kind("")
    except TypeError:  # required arguments, which do not affect exit codes
        return kind.__new__(kind)


def _documented_tests(name: str) -> str:
    """Rows of the document's tables that name tests: first cell, then the tests."""
    rows = []
    for line in (product.ROOT / "docs" / name).read_text().splitlines():
        cells = [cell.strip() for cell in _CELL.split(line)[1:-1]]
        if cells and (tests := _tests_of(" ".join(cells[1:]))):
            rows.append(f"{cells[0]} => {' '.join(tests)}")
    return "\n".join(rows) + "\n"


def _tests_of(text: str) -> list[str]:
    """Return the code spans that name a test file, or the start or end of a test's name."""
    tests: list[str] = []
    end = 0
    for span in re.finditer(r"`([^`]+)`", text):
        is_named_after_a_file = (
            bool(tests) and re.fullmatch(r"[ ,]*", text[end : span.start()]) and span[1].isidentifier()
        )
        is_part_of_a_name = "…" in span[1] and not re.search(r"[ /]", span[1])
        if span[1].startswith("tests/") or is_part_of_a_name or is_named_after_a_file:
            tests.append(span[1])
            end = span.end()
    return tests
