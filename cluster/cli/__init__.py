"""Command line interface. `main` is the entry point of the `cluster` command."""

from cluster.cli.app import main

__all__ = ["main"]
