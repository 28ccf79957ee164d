"""The page at the front door as it is sent; what it does in a browser is in tests/integration/test_page.py."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lr_backend
from lr_backend.frontend.settings import Settings
from lr_backend.frontend.static import HEADERS, POLICY
from lr_backend.request import Mode
from lr_backend.serve.warmup import QUESTION
from tests.support.fake_lookahead import FakeServer
from tests.support.frontend import DEPLOYED, Served, frontend

KEY = "a-key-of-twenty-char"
PROJECT = Path(__file__).parents[2]
PAGE = Path(lr_backend.__file__).parent / "frontend" / "page"
FILES = sorted(path.name for path in PAGE.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]
KINDS = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """With keys, so that whatever comes without one needs none."""
    paced = DEPLOYED.model_copy(update={"pace": "as on a machine", "default_tokens": 80, "default_temperature": 0.6})
    with FakeServer({}) as upstream, frontend(upstream.url, deployed=paced, keys=[KEY]) as running:
        yield running


class Tags(HTMLParser):
    """The tags of a document, with their attributes, and the text inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.fixture(scope="module")
def tags() -> Tags:
    return Tags((PAGE / "index.html").read_text(encoding="utf-8"))


def test_the_door_shows_the_page(served: Served) -> None:
    answer = served.ask("GET", "/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.raw == (PAGE / "index.html").read_bytes() and answer.headers["x-request-id"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_comes_with_its_kind_and_what_forbids_everything_else(served: Served, name: str) -> None:
    answer = served.ask("GET", f"/page/{name}")
    assert answer.status == 200 and answer.raw == (PAGE / name).read_bytes()
    assert answer.headers["content-type"] == f"{KINDS[name.rpartition('.')[2]]}; charset=utf-8"
    assert {header: answer.headers[header] for header in HEADERS} == HEADERS


def test_nothing_but_its_own_files_is_allowed() -> None:
    said = {name: words for name, *words in (rule.split() for rule in POLICY.split("; "))}
    assert said["default-src"] == ["'none'"]
    assert {word for words in said.values() for word in words} == {"'none'", "'self'", "'script'"}
    assert said["require-trusted-types-for"] == ["'script'"] and said["frame-ancestors"] == ["'none'"]


def test_it_is_told_what_it_shows_and_no_secret(served: Served) -> None:
    told: dict[str, Any] = served.ask("GET", "/page/about.json").document
    assert told == {
        "model": "demo",
        "modes": [mode.value for mode in Mode],
        "question": QUESTION,
        "max_tokens": 100,
        "default_tokens": 80,
        "default_temperature": 0.6,
        "pace": "as on a machine",
        "keyed": True,
    }


def test_the_api_beside_it_wants_its_key(served: Served) -> None:
    assert (served.chat("?").status, served.ask("GET", "/v1/models").status) == (401, 401)
    assert served.ask("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status == 200


@pytest.mark.parametrize("path", ["/page/none.js", "/page/", "/page", "/page/..%2fapp.py", "/page/../app.py", "/index.html"])
def test_there_is_nothing_else(served: Served, path: str) -> None:
    answer = served.ask("GET", path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")


def test_an_operator_can_turn_it_off(tmp_path: Path) -> None:
    file = tmp_path / "openai.toml"
    file.write_text("page = false\n")
    with FakeServer({}) as upstream, frontend(upstream.url, Settings.load(file)) as running:
        assert [running.ask("GET", path).status for path in ("/", "/page/main.js", "/health")] == [404, 404, 200]


def test_it_loads_its_own_files_and_has_no_script_inside(tags: Tags) -> None:
    assert tags.inline == []
    for tag, attributes in tags.found:
        assert "style" not in attributes and not [name for name in attributes if name.startswith("on")], tag
    loaded = {attributes.get("src") or attributes.get("href") for tag, attributes in tags.found if tag in ("script", "link")}
    assert loaded == {"page/main.js", "page/page.css", "page/icon.svg"}
    assert {f"page/{name}" for name in FILES} >= loaded
    assert ("html", {"lang": "en"}) in tags.found


def test_every_field_has_a_label(tags: Tags) -> None:
    labels = {attributes["for"] for tag, attributes in tags.found if tag == "label"}
    assert labels == {attributes["id"] for tag, attributes in tags.found if tag in ("input", "select", "textarea")}


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_site(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|[\"'(]//|@import", text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_markup_of_text(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|localStorage", text
    )
    assert all(f"{other}.js" in SCRIPTS for other in re.findall(r'from "\./(\w+)\.js"', text))


def test_the_package_brings_its_files() -> None:
    said = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    assert all(any(fnmatch(f"frontend/page/{name}", pattern) for pattern in said["lr_backend"]) for name in FILES)
