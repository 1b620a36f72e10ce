"""What the check found, on the terminal and in two files, from its first row on."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from tests.gpu_check.rows import Row


class Report:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: list[tuple[str, float, list[Row]]] = []  # name, seconds, rows
        self._began = 0.0

    @property
    def is_fine(self) -> bool:
        return all(row.is_fine for _, _, rows in self._parts for row in rows)

    def begin(self, name: str) -> None:
        self._began = time.monotonic()
        self._parts.append((name, 0.0, []))
        print(f"\n{name}", flush=True)

    def add(self, row: Row) -> None:
        self._parts[-1][2].append(row)
        print(f"  {row.verdict:<8}{row.name:<44} {row.shown} {row.unit}  {row.threshold}".rstrip(), flush=True)
        self._write()

    def end(self) -> None:
        """Of a part."""
        name, _, rows = self._parts[-1]
        self._parts[-1] = (name, time.monotonic() - self._began, rows)
        self._write()

    def _write(self) -> None:
        parts = [{"part": name, "seconds": round(s, 1), "rows": [*map(asdict, rows)]} for name, s, rows in self._parts]
        (self._directory / "report.json").write_text(json.dumps(parts, indent=1))
        (self._directory / "report.md").write_text("\n".join(map(_section, self._parts)))


def _section(part: tuple[str, float, list[Row]]) -> str:
    name, seconds, rows = part
    head = f"## {name} ({seconds:.0f} s)\n\n| what | value | threshold | verdict |\n|---|---|---|---|\n"
    return head + "".join(
        f"| {row.name} | {row.shown} {row.unit} | {row.threshold} | {row.verdict} |\n" for row in rows
    )
