"""The rim: everything that touches Triton. Only the two ``*_model`` modules import ``triton_python_backend_utils``."""
