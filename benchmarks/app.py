"""Benchmarks of single parts of the cluster on this machine, and chaos tests of a deployment."""

from __future__ import annotations

import typer

from benchmarks.chaos.command import chaos
from benchmarks.checkpoints.command import checkpoints
from benchmarks.engine.command import engine, kernels
from benchmarks.isolation.command import isolation
from benchmarks.kv.command import kv
from benchmarks.router.command import router
from benchmarks.speculation.command import speculation
from cluster.cli.app import run_app

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
for command in (engine, kernels, kv, router, isolation, speculation, checkpoints, chaos):
    app.command()(command)


def run(arguments: list[str]) -> int:
    """Run one command. Returns its exit code."""
    code, _ = run_app(app, arguments, name="benchmarks")
    return code
