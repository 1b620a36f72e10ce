"""`cluster monitoring`: boards for Grafana, alerts and a configuration for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from core.types.errors import SpecError


def monitoring(
    directory: Annotated[Path, typer.Argument(help="Where the files go; those of that name are replaced.")],
    admin: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT at which a router answers operators, as `cluster status` says; several times."),
    ] = None,
) -> None:
    """Write Grafana boards, Prometheus alerts and a prometheus.yml for every metric of this version."""
    from router.telemetry.files import monitoring_files

    for address in admin or ():
        if not address.rpartition(":")[2].isdigit():
            raise SpecError(f"--admin {address}: write HOST:PORT")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in monitoring_files(admin=admin).items():
            (directory / name).write_text(text)
            print(directory / name)
    except OSError as error:
        raise SpecError(f"{directory}: {error.strerror}") from error
