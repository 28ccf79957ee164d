"""Deployment specs: one TOML file says what is served, from which checkpoints, with which limits.

A spec is frozen and refuses unknown keys. Paths in it are relative to its project root: the folder above ``engines/`` for a
spec kept there, else the spec's own folder. ``DeploymentSpec.load`` gives the class of the file's runtime; importing this module
registers them all.
"""

from __future__ import annotations

from lr_backend.build.base import PACKAGE_ROOT, DeploymentSpec, EngineSpec, ServerSpec
from lr_backend.build.embedded_spec import EmbeddedDeployment, EmbeddedEngineSpec
from lr_backend.build.emulated_spec import EmulatedDeployment
from lr_backend.build.gpu_spec import GpuDeployment, HardwareSpec, LlmapiEngineSpec, TrtllmEngineSpec

__all__ = [
    "PACKAGE_ROOT",
    "DeploymentSpec",
    "EmbeddedDeployment",
    "EmbeddedEngineSpec",
    "EmulatedDeployment",
    "EngineSpec",
    "GpuDeployment",
    "HardwareSpec",
    "LlmapiEngineSpec",
    "ServerSpec",
    "TrtllmEngineSpec",
]
