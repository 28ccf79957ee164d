"""What happened in one request: the trace's schema, and how it is read, summed up and drawn.

:mod:`~lr_backend.trace.schema` is what the server sends; :mod:`~lr_backend.trace.analysis` finds where the time went and why;
:mod:`~lr_backend.trace.html`, :mod:`~lr_backend.trace.chrome` and :mod:`~lr_backend.trace.report` show it. All are pure.
"""
