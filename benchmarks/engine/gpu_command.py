"""Command-line arguments of the GPU benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch


def requested_shapes(document: str | None, shapes: Sequence[str] = (), *, is_one: bool = False) -> list[str]:
    """Return the shapes named on the command line; all if none is named, unless it must be one.

    Exits with one line if the arguments are wrong or there is no GPU. shapes: to choose from; empty: takes no shapes.
    document: text of --help.
    """
    prog = f"python -m {spec.name}" if (spec := sys.modules["__main__"].__spec__) else None
    parser = argparse.ArgumentParser(
        prog=prog, description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if shapes:
        parser.add_argument("shapes", nargs=1 if is_one else "*", metavar="SHAPE", help=f"of {', '.join(shapes)}")
    selected: list[str] = vars(parser.parse_args()).get("shapes", [])
    for shape in selected:
        if shape not in shapes:
            parser.error(f"shape {shape} not found; available: {', '.join(shapes)}")
    if not torch.cuda.is_available():
        sys.exit(f"{parser.prog}: this machine has no CUDA device that torch can use")
    return selected or list(shapes)
