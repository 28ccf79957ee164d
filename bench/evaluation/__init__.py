"""Speed and quality over a data set: ``lookahead eval`` asks and scores, ``lookahead report`` says what came of it.

A run directory holds everything that was measured: ``run.json`` (the settings), ``answers.jsonl`` (every answer with its usage
and trace), ``failures.jsonl`` and ``scores.jsonl``. Asking, scoring and reporting are apart: a report never asks, and an answer
is never asked again because its scorer failed.
"""
