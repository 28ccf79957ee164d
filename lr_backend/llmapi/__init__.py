"""An engine over TensorRT-LLM's LLM API (PyTorch flow), behind the same tensor contract as a compiled engine.

The path for releases whose engine flow is gone. It serves no draft tokens: see :mod:`~lr_backend.llmapi.sampling`.
"""
