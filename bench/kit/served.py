"""What a server of our own has served, as hashes: figures of another one are not to be taken for its own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import lr_backend
from lr_backend.build.digests import sha256_text
from lr_backend.build.emulated_spec import EmulatedDeployment
from lr_backend.build.render import TEMPLATES
from lr_backend.build.spec import DeploymentSpec
from lr_backend.engine import Role

SOURCES = Path(lr_backend.__file__).parent
SUFFIXES = (".py", ".c", ".h", ".json", ".toml", ".pbtxt", ".jinja")
"""Of code, of the tables that it reads, and of what models are rendered from."""


def code_hash(*folders: Path) -> str:
    """Another one once a file of the server's code has changed, been added, moved or removed."""
    digest = hashlib.sha256()
    for folder in folders or (SOURCES, TEMPLATES):
        for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def served_hash(deployment: DeploymentSpec) -> str:
    """Another one once the spec has changed, or a file of a checkpoint by its size or time: large ones are not read.

    Of scripted texts it is the workload that counts, and not where its file lies.
    """
    parts = [deployment.model_dump_json(exclude={"workload"})]
    if isinstance(deployment, EmulatedDeployment):
        parts.append(deployment.texts.as_toml())
        parts += [pace.as_json() for role in Role if (pace := deployment.engine_pace(role)) is not None]
    for folder in sorted({deployment.checkpoint_dir(role) for role in Role}):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            status = path.stat()
            parts.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return sha256_text("\n".join(parts))
