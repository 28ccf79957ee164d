"""The page at the front door, and the files that it loads: sent as they lie in the package. Nobody needs a key for them."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response

from lr_backend.frontend.answers import to_json
from lr_backend.frontend.errors import ApiError
from lr_backend.frontend.settings import Deployed
from lr_backend.request import Mode
from lr_backend.serve.warmup import QUESTION

INDEX, ABOUT = "index.html", "about.json"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, no script but the files, and no text that a script could make markup of."""
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_KINDS = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "json": "application/json",
    "svg": "image/svg+xml",
}


class Page:
    """Its files, read once. ``keyed``: the API wants a key, so the page asks for one."""

    def __init__(self, deployed: Deployed, *, keyed: bool) -> None:
        about = {
            "model": deployed.name,
            "modes": [mode.value for mode in Mode],
            "question": QUESTION,
            "max_tokens": deployed.max_tokens,
            "default_tokens": deployed.default_tokens,
            "default_temperature": deployed.default_temperature,
            "pace": deployed.pace,
            "keyed": keyed,
        }
        folder = files("lr_backend.frontend") / "page"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir()} | {ABOUT: to_json(about)}

    def answer(self, name: str, headers: dict[str, str]) -> Response:
        """One of the files.

        Raises:
            ApiError: there is no such file.
        """
        if (content := self._files.get(name)) is None:
            raise ApiError("not_found", "Not Found")
        kind = _KINDS[name.rpartition(".")[2]]
        return Response(content, headers=headers | HEADERS | {"content-type": f"{kind}; charset=utf-8"})
