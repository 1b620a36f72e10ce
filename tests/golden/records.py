"""Writing of records, and comparison of this tree with them."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from tests.golden.texts import TEXTS
from tests.golden.tokens import GROUPS, differences, processor, run, to_text

RECORDS = Path(__file__).parent / "records"


@dataclass
class Result:
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def names() -> list[str]:
    """Return the names of all texts, then of all groups of tokens."""
    return [*TEXTS, *GROUPS]


def record_text(name: str) -> list[str]:
    _write(_text_file(name), TEXTS[name]())
    return []


def check_text(name: str) -> list[str]:
    """Return the diff between the record and this tree. Lines are self-contained, so it has no context."""
    old, new = _text_file(name).read_text().splitlines(), TEXTS[name]().splitlines()
    return list(difflib.unified_diff(old, new, f"recorded {name}", "this tree", lineterm="", n=0))


def record_tokens(name: str, directory: Path, redis_url: str) -> list[str]:
    """Record a group. If its cases disagree, write nothing and return the differences."""
    group = GROUPS[name]
    found = run(group, directory, redis_url)
    if wrong := _disagreements(found["cases"], group.within):
        return wrong
    first, *_ = found["cases"].values()
    _write(
        _tokens_file(name),
        to_text(
            {
                "made on": processor(),
                "made with": f"torch {torch.__version__}, transformers {transformers.__version__}",
                "weights": found["weights"],
                "logprobs within": group.within,
                "cases": list(found["cases"]),
                "answers": first,
            }
        ),
    )
    return []


def check_tokens(name: str, directory: Path, redis_url: str, *, only_quick: bool = False) -> Result:
    """Compare each case with the first one, and with the record if it was made on such a machine."""
    group, old = GROUPS[name], json.loads(_tokens_file(name).read_text())
    result = Result()
    gone, new = set(old["cases"]) - set(group.cases), set(group.cases) - set(old["cases"])
    result.wrong += [f"case {case!r} is recorded and no longer defined" for case in sorted(gone)]
    result.wrong += [f"case {case!r} is not recorded" for case in sorted(new)]
    if only_quick and not group.quick:
        return result
    found = run(group, directory, redis_url, only_quick=only_quick)
    result.wrong += _disagreements(found["cases"], group.within)
    if old["made on"] != processor():
        result.notes.append(f"not compared with the record: made on {old['made on']}, this is {processor()}")
    elif old["weights"] != found["weights"]:
        result.notes.append(f"not compared with the record: other random weights, made with {old['made with']}")
    else:
        for case, answers in found["cases"].items():
            wrong = differences(old["answers"], answers, within=group.within)
            result.wrong += [f"{case}, against the record: {line}" for line in wrong]
    return result


def _disagreements(cases: dict[str, list[dict[str, str]]], within: float) -> list[str]:
    (first, expected), *others = cases.items()
    return [
        f"{case}, against {first}: {line}"
        for case, answers in others
        for line in differences(expected, answers, within=within)
    ]


def _text_file(name: str) -> Path:
    return RECORDS / f"{name}.txt"


def _tokens_file(name: str) -> Path:
    return RECORDS / f"tokens {name}.json".replace(" ", "_")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
