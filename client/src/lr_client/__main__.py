"""``python -m lr_client``."""

from lr_client.cli import app

app()
