"""The rim: everything that touches Triton. Only the three ``*_model`` modules import ``triton_python_backend_utils``."""
