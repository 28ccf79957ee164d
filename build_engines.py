"""Build what a deployment spec says: ``python build_engines.py --spec NAME [--role R] [--output DIR] [--dry-run] [--resume]``.

The same as ``lookahead build``; it lies here because a build is the first thing that a deployment runs.
"""

import typer

from lr_backend.cli.app import build

if __name__ == "__main__":
    typer.run(build)
