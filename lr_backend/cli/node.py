"""``lookahead node``: one machine of a role whose engine spans several."""

from __future__ import annotations

import os

from rich.console import Console

from lr_backend.cli.errors import fail
from lr_backend.cli.stop import StopRequest
from lr_backend.errors import LookaheadError
from lr_backend.serve.sshd import run_node


def node() -> None:
    """Run the ranks that the leader of a group starts here by ssh, and end with them.

    LOOKAHEAD_NODE_KEY_FILE names the private key that the group shares. SIGTERM lets ranks finish that are here.
    """
    console = Console()
    stop = StopRequest()
    try:
        run_node(os.environ, stop.asked, lambda line: console.print(line, highlight=False, soft_wrap=True))
    except LookaheadError as error:
        fail(error)
