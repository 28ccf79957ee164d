"""Lines to try a front end with, for a shell. They can be copied."""

from __future__ import annotations

import json
import shlex
import sys

KEY_VARIABLE = "LOOKAHEAD_API_KEY"


def curl_line(url: str, model: str, question: str, *, keyed: bool) -> str:
    """By curl. ``keyed``: the server wants a key, which the shell has in :data:`KEY_VARIABLE`."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]})
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    return f"curl -s {url}/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def python_line(url: str, model: str, question: str, *, keyed: bool, timeout_s: float) -> str:
    """By OpenAI's client for Python, which else waits for 600 seconds, and asks again. ``python`` may be no command."""
    key = f'os.environ["{KEY_VARIABLE}"]' if keyed else '"none"'
    code = (
        f"{'import os; ' if keyed else ''}from openai import OpenAI; "
        f"client = OpenAI(base_url={json.dumps(url)}, api_key={key}, timeout={timeout_s:g}); "
        f'asked = [dict(role="user", content={json.dumps(question)})]; '
        f"print(client.chat.completions.create(model={json.dumps(model)}, messages=asked).choices[0].message.content)"
    )
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
