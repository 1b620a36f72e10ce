"""What the benches of a GPU are asked by `python -m`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch


def asked_shapes(document: str | None, shapes: Sequence[str] = (), *, is_one: bool = False) -> list[str]:
    """The shapes that a command line names: all where it names none, unless it must be one. Ends the process with one
    line where it is wrong, or where there is no GPU.

    shapes: to choose from; empty: the bench knows none. document: what --help says.
    """
    prog = f"python -m {spec.name}" if (spec := sys.modules["__main__"].__spec__) else None
    parser = argparse.ArgumentParser(
        prog=prog, description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if shapes:
        parser.add_argument("shapes", nargs=1 if is_one else "*", metavar="SHAPE", help=f"of {', '.join(shapes)}")
    asked: list[str] = vars(parser.parse_args()).get("shapes", [])
    for shape in asked:
        if shape not in shapes:
            parser.error(f"no shape is named {shape}; choose one of {', '.join(shapes)}")
    if not torch.cuda.is_available():
        sys.exit(f"{parser.prog}: this machine has no CUDA device that torch can use")
    return asked or list(shapes)
