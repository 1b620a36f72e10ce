"""python tests/golden/pair.py OLD_TREE NEW_TREE [BENCH...]: the same benchmarks in both trees, in turns.

Runs old, new, old, new, ... with this Python and PYTHONPATH set to the tree, and prints medians and their ratio (new /
old) for every number of the benchmark's JSON that is not the same constant everywhere. The spread of the
old tree's own runs is printed beside each ratio: smaller differences are noise. Run nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

CLI = "-m benchmarks"  # arguments of Python in both trees; `--old-cli "-m cluster.cli bench"` for trees before the move
BENCHES = {
    "engine": "engine --batch 1,8,32 --prefill 512,2048 --json",
    "kv": "kv --message 256,4096,65536 --prompt 1024,2048 --json",
    "router": "router --streams 1000 --rounds 3 --json",
    "isolation": "isolation --seconds 40 --json",
}
SMALL = {
    "engine": "engine --batch 1 --context 32 --prefill 64 --json",
    "kv": "kv --message 256 --prompt 256 --json",
    "router": "router --streams 0 --requests 16 --tokens 16 --prompt 0 --rounds 1 --json",
    "isolation": "isolation --seconds 8 --prompt-tokens 256 --streams 2 --json",
}
_LIMIT_S = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="runs in each tree")
    parser.add_argument("--small", action="store_true", help="small settings: a trial of this script, no measurement")
    parser.add_argument("--old-cli", default=CLI, help=f"default: {CLI}")
    parser.add_argument("--new-cli", default=CLI, help=f"default: {CLI}")
    parser.add_argument("--only", default="", help="print only numbers whose path has this in it, such as token_ms")
    options = parser.parse_args()
    settings = SMALL if options.small else BENCHES
    if unknown := set(options.benches) - set(settings):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are: {', '.join(settings)}")
    trees = {"old": (options.old.absolute(), options.old_cli), "new": (options.new.absolute(), options.new_cli)}
    for tree, _ in trees.values():
        _check_imports_from(tree)
    for bench in options.benches or settings:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in trees}
        for number in range(options.rounds):
            for side, (tree, cli) in trees.items():
                print(f"{bench}: round {number + 1}, {side}", file=sys.stderr, flush=True)
                runs[side].append(dict(_numbers(_run(tree, f"{cli} {settings[bench]}"))))
        print("\n".join(_table(bench, runs["old"], runs["new"], options.only)), flush=True)
    return 0


def _check_imports_from(tree: Path) -> None:
    """Check that no installed package shadows the tree."""
    found = _python(tree, ["-c", "import cluster; print(cluster.__file__)"]).strip()
    if not Path(found).is_relative_to(tree):
        raise SystemExit(f"{tree}: Python imports cluster from {found}; give a tree that holds the package")


def _run(tree: Path, arguments: str) -> Any:
    lines = _python(tree, shlex.split(arguments)).splitlines()
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def _python(tree: Path, arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(
            f"{tree}: python {shlex.join(arguments)} exited with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return done.stdout


def _numbers(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield (path, value) of every number of a JSON document."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _numbers(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _numbers(value, f"{path}[{number}]")
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, float(tree)


def _table(bench: str, old: list[dict[str, float]], new: list[dict[str, float]], only: str) -> Iterator[str]:
    yield f"{bench:<52} {'old':>12} {'new':>12} {'new/old':>8}  {'spread of old':>13}"
    for path in dict.fromkeys(path for run in (*old, *new) for path in run):
        sides = [[run[path] for run in runs if path in run] for runs in (old, new)]
        if only not in path or len({value for side in sides for value in side}) == 1:
            continue
        if not all(sides):
            yield f"{path:<52} only in the {'old' if sides[0] else 'new'} tree"
            continue
        before, after = map(median, sides)
        ratio = f"{after / before:8.3f}" if before else f"{'-':>8}"
        spread = f"{(max(sides[0]) - min(sides[0])) / before:13.1%}" if before else f"{'-':>13}"
        yield f"{path:<52} {before:12.4f} {after:12.4f} {ratio}  {spread}"


if __name__ == "__main__":
    sys.exit(main())
