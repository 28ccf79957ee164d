"""The keeper and a Triton that does not let a dead model go."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lr_backend.serve import keeper as room
from lr_backend.serve.keeper import StubKeeper


@pytest.fixture
def silent() -> Iterator[str]:
    """Takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(("model", "drains"), [("draft", True), ("lookahead", False)])
def test_a_model_that_is_not_let_go_is_lost_and_the_answers_in_flight_are_not(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, drains: bool
) -> None:
    monkeypatch.setattr(room, "UNLOAD_S", 0.1)
    server = SimpleNamespace(pid=None, http_url=silent, admin_key="k", notice_file=tmp_path / "notice", running=True)
    said: list[str] = []
    keeper = StubKeeper(server, said.append)  # type: ignore[arg-type]
    keeper._has_died(model)
    assert keeper.lost.is_set() and keeper.can_drain is drains
    assert f"{model} is back" not in said and "died" in keeper.why
    keeper.stop()
