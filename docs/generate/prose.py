"""Markdown prose at one width. Code, tables, headings and comments stay as they are."""

from __future__ import annotations

import re
import textwrap

WIDTH = 120

_FENCE = re.compile(r"\s*(```|~~~)")
_AS_IT_IS = re.compile(r"\s*(\||#|<!--|\[!|\[[^\]]+\]:|---$|$)")
_ITEM = re.compile(r"(\s*)([-*+]|\d+\.)\s+")
_CODE = re.compile(r"`[^`\n]{1,90}`")
_LIST_MARK = re.compile(r" (?=(?:[-+*=#]|\d+\.|```)(?: |$))")  # it would begin a list or a heading if a line began so
_GLUE = "\0"  # a space at which no line ends


def wrap(text: str) -> str:
    """`text` with every paragraph and list item filled up to WIDTH."""
    done: list[str] = []
    paragraph: list[str] = []
    is_code = False
    in_list = False

    def end() -> None:
        if paragraph:
            done.append(_filled(paragraph))
            paragraph.clear()

    for line in text.splitlines():
        is_fence = bool(_FENCE.match(line))
        is_item = bool(_ITEM.match(line))
        is_indented = line.startswith("    ") and not in_list and not paragraph
        if is_code or is_fence or _AS_IT_IS.match(line) or (is_indented and not is_item):
            end()
            done.append(line.rstrip())
            is_code ^= is_fence
        else:
            if is_item:
                end()
            paragraph.append(line)
        if line.strip():
            in_list = is_item or (in_list and line.startswith(" ")) or (in_list and bool(paragraph))
    end()
    return "\n".join(done) + "\n"


def _filled(lines: list[str]) -> str:
    item = _ITEM.match(lines[0])
    first = f"{item[1]}{item[2]} " if item else lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    words = " ".join([lines[0][item.end() :] if item else lines[0], *lines[1:]])
    words = " ".join(words.split())
    words = _CODE.sub(lambda code: code[0].replace(" ", _GLUE), words)
    words = _LIST_MARK.sub(_GLUE, words)
    filled = textwrap.fill(
        words,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_GLUE, " ")
