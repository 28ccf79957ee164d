"""The verifiers of the paper's table 2 that a server does without, as plug-ins (``docs/plug-ins.md``)."""
