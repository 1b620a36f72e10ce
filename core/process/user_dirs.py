"""Directories of the user who runs this process."""

from __future__ import annotations

import os
from pathlib import Path

from core.types.errors import SpecError


def user_dir(variable: str, *below_home: str) -> Path:
    """Return the absolute directory that the environment variable names, or the one below the user's home.

    Raises SpecError if there is neither, as for a container's user id without a passwd entry.
    """
    if directory := os.environ.get(variable):
        return Path(directory).expanduser().absolute()
    try:
        return Path.home().joinpath(*below_home)
    except RuntimeError:
        raise SpecError(
            f"HOME is not set and user id {os.getuid()} has no passwd entry; set {variable} to a writable directory"
        ) from None
