"""Chat templates of a model directory, by name: most have one, some a second one for requests with tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.model.settings import read_object
from core.model.tokenizer_file import TEKKEN, tekken_format
from core.types.errors import SpecError

_TEKKEN_VERSIONS = (7, 11, 13)
_DEEPSEEK = "DeepseekV32ForCausalLM"
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names, as in transformers


def find_chat_template(model_dir: Path, given: str | None = None) -> Mapping[str, str] | None:
    """Return the operator's template, given as text or as a file, else those of the model directory, by name.

    The latter are chat_template.jinja and additional_chat_templates/NAME.jinja, or those in tokenizer_config.json or
    chat_template.json: a text, or several by name; without those, a template of ours for formats that model files
    describe in other ways. Returns None if there is none. Raises SpecError.
    """
    if given is not None:
        return {DEFAULT: given if "{{" in given or "{%" in given else _read(Path(given))}
    files = {path.stem: path for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
    if (default := model_dir / "chat_template.jinja").is_file():
        files[DEFAULT] = default
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if found := _named(read_object(model_dir / name, missing_ok=True).get("chat_template")):
            return found
    return _ours(model_dir)


def _ours(model_dir: Path) -> Mapping[str, str] | None:
    """Return our template for a model whose files describe its format in other ways than a template."""
    here = Path(__file__).parent
    if (model_dir / TEKKEN).is_file():
        version, tokens = tekken_format(model_dir / TEKKEN)
        thought = [token for token in ("[THINK]", "[/THINK]") if token in tokens]
        head = f"{{%- set version = {version} %}}{{%- set thought = {thought} %}}"
        return {DEFAULT: head + _read(here / "mistral.jinja")} if version in _TEKKEN_VERSIONS else None
    if _DEEPSEEK in (read_object(model_dir / "config.json", missing_ok=True).get("architectures") or ()):
        return {DEFAULT: _read(here / "deepseek_v32.jinja")}
    return None


def _named(given: Any) -> dict[str, str]:
    """Return templates by name, from a text, {name: text} or [{"name": name, "template": text}, …]."""
    if isinstance(given, str):
        return {DEFAULT: given}
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
