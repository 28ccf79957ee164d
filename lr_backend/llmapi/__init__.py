"""An engine over TensorRT-LLM's LLM API (PyTorch flow), behind the same tensor contract as a compiled engine.

The path for releases whose engine flow is gone. It takes no draft tokens from a caller (:mod:`~lr_backend.llmapi.sampling`),
and may write its own (:mod:`~lr_backend.llmapi.speculation`).
"""
