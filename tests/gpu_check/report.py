"""Results of the check on the terminal and in two files, updated with every row."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.gpu_check.rows import Row


class Report:
    def __init__(self, directory: Path, *, left_out: Sequence[str] = ()) -> None:
        """left_out: parts that were deselected."""
        self._directory = directory
        self._left_out = left_out
        self._parts: list[tuple[str, float, list[Row]]] = []  # name, seconds, rows

    @property
    def is_fine(self) -> bool:
        return all(row.is_fine for _, _, rows in self._parts for row in rows)

    @property
    def summary(self) -> str:
        """Return the verdict, and the parts that were not checked."""
        rows = [(name, row) for name, _, rows in self._parts for row in rows]
        counts = {verdict: sum(row.verdict == verdict for _, row in rows) for verdict in ("FAILED", "MISSED", "met")}
        device = next((row.shown for _, row in rows if row.name == "device"), "unknown")
        lines = [
            f"{'Right and quick enough' if self.is_fine else 'NOT FINE'} on device {device}: "
            f"{counts['FAILED']} failed, {counts['MISSED']} thresholds missed, {counts['met']} met"
        ]
        for verdict in ("FAILED", "MISSED", "skipped"):
            lines += [
                f"{verdict}: {name}: {row.name}: {row.shown} {row.unit} {row.threshold}".rstrip()
                for name, row in rows
                if row.verdict == verdict
            ]
        return "\n".join([*lines, *(f"not asked for: {name}" for name in self._left_out)])

    def part(self, name: str, rows: Iterable[Row]) -> None:
        """Add a part; print each of its rows as it comes."""
        begin = time.monotonic()
        self._parts.append((name, 0.0, []))
        print(f"\n{name}", flush=True)
        for row in rows:
            self._parts[-1][2].append(row)
            print(f"  {row.verdict:<8}{row.name:<44} {row.shown} {row.unit}  {row.threshold}".rstrip(), flush=True)
            self._write()
        self._parts[-1] = (name, time.monotonic() - begin, self._parts[-1][2])
        self._write()

    def _write(self) -> None:
        parts = [{"part": name, "seconds": round(s, 1), "rows": [*map(asdict, rows)]} for name, s, rows in self._parts]
        (self._directory / "report.json").write_text(json.dumps(parts, indent=1), encoding="utf-8")
        text = "\n".join([self._head(), *map(_section, self._parts)])
        (self._directory / "report.md").write_text(text, encoding="utf-8")

    def _head(self) -> str:
        verdict, *exceptions = self.summary.splitlines()
        return f"# {verdict}\n\n" + "".join(f"- {line}\n" for line in exceptions)


def _section(part: tuple[str, float, list[Row]]) -> str:
    name, seconds, rows = part
    took = f" ({seconds:.0f} s)" if seconds >= 1 else ""
    head = f"## {name}{took}\n\n| what | value | threshold | verdict |\n|---|---|---|---|\n"
    return head + "".join(
        f"| {row.name} | {row.shown} {row.unit} | {row.threshold} | {row.verdict} |\n" for row in rows
    )
