"""The step loop: :mod:`~lr_backend.loop.loop` is the algorithm, the other modules are its pure parts."""
