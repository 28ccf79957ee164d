"""The {{ role }} engine. Triton loads this file; the code is the package's."""

from lr_backend.triton.engine_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
