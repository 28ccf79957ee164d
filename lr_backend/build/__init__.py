"""From a deployment spec to a model repository that Triton loads. Imports only the leaves and the contract; no torch.

Where to look:

- what a TOML file may say: :mod:`~lr_backend.build.base` (all runtimes), :mod:`~lr_backend.build.embedded_spec`,
  :mod:`~lr_backend.build.gpu_spec`; import them from :mod:`~lr_backend.build.spec`
- a build from end to end: :mod:`~lr_backend.build.repository` (no compiling), :mod:`~lr_backend.build.gpu_build` (engines)
- the inputs: :mod:`~lr_backend.build.checkpoints`, :mod:`~lr_backend.build.shapes`; whether they fit:
  :mod:`~lr_backend.build.memory`
- upstream's command lines: :mod:`~lr_backend.build.trtllm_commands`; running them: :mod:`~lr_backend.build.runner`
- what came out: :mod:`~lr_backend.build.engine_check`, :mod:`~lr_backend.build.manifest`, :mod:`~lr_backend.build.render`
"""
