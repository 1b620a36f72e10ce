"""Options that describe drafts, and a table of the throughput they give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.console import columns
from core.types.errors import SpecError

if TYPE_CHECKING:
    from planner.simulator.profile import Profile

_MAX_TOKENS = 64
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

DraftsOption = Annotated[
    str | None,
    typer.Option(
        "--drafts",
        metavar="SHARES",
        help="Acceptance rate of each draft position, given that those before it are accepted,"
        " such as 0.8,0.7,0.6 or 0.75x8; off: no drafts. Default: as in the profile.",
    ),
]
DraftPass = Annotated[
    float, typer.Option("--draft-pass-ms", min=0, help="With --drafts: time to draft one position, for all rows.")
]


def with_drafts(profile: Profile, drafts: str | None, pass_ms: float) -> Profile:
    """Return the profile with the options applied. Raises SpecError."""
    from planner.simulator.profile import Drafts

    if drafts is None:
        if pass_ms:
            raise SpecError("--draft-pass-ms needs --drafts with the acceptance rates")
        return profile
    if drafts == "off":
        return profile.model_copy(update={"drafts": None})
    return profile.model_copy(update={"drafts": Drafts(accepted=_shares(drafts), ask_place_s=pass_ms / 1e3)})


def draft_lines(profile: Profile, *, context: int) -> list[dict[str, Any]]:
    """Return figures for increasing numbers of rows: without drafts, with the best draft length, with the longest.

    Raises SpecError.
    """
    from planner.simulator.drafts import draft_table

    if (drafts := profile.drafts) is None:
        raise SpecError("give acceptance rates with --drafts, or a --profile that has them")
    lines = []
    for rows in _ROWS:
        table = draft_table(profile.decode_timing(), drafts, rows, context=context)
        plain, best, longest = table[0], max(table, key=lambda line: line.tokens_per_s), table[-1]
        lines.append(
            {
                "rows": rows,
                "tokens_per_s": plain.tokens_per_s,
                "length": best.length,
                "tokens_per_row": best.tokens_per_row,
                "step_ms": best.step_s * 1e3,
                "drafting_tokens_per_s": best.tokens_per_s,
                "speedup": best.tokens_per_s / plain.tokens_per_s,
                "longest_speedup": longest.tokens_per_s / plain.tokens_per_s,
                "pays_above": plain.floor,
            }
        )
    return lines


def lines_table(lines: list[dict[str, Any]]) -> str:
    """Format the figures. PAYS ABOVE is the acceptance rate from which a drafted token pays."""
    rows = [["ROWS", "TOKENS/S", "DRAFT", "TOKENS/STEP", "STEP ms", "TOKENS/S", "SPEED-UP", "LONGEST", "PAYS ABOVE"]]
    for line in lines:
        step = [f"{line[key]:.2f}" for key in ("tokens_per_row", "step_ms")]
        gains = [f"{line[key]:.2f}" for key in ("speedup", "longest_speedup", "pays_above")]
        plain, drafting = (f"{line[key]:,.0f}" for key in ("tokens_per_s", "drafting_tokens_per_s"))
        rows.append([str(line["rows"]), plain, str(line["length"] or "-"), *step, drafting, *gains])
    return columns(rows)


def _shares(text: str) -> list[float]:
    """Parse the acceptance rate of each position."""
    wrong = SpecError(f"--drafts {text}: write rates from 0 to 1 for up to {_MAX_TOKENS} positions: 0.8,0.7 or 0.75x8")
    each, times, count = text.partition("x")
    try:
        shares = [float(share) for share in each.split(",")] * (int(count) if times else 1)
    except ValueError:
        raise wrong from None
    if not (0 < len(shares) <= _MAX_TOKENS and all(0 <= share <= 1 for share in shares)):
        raise wrong
    return shares
