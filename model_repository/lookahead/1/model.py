"""The step loop. Triton loads this file; the code is the package's."""

from lr_backend.triton.bls_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
