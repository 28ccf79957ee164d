"""What can go wrong in a load test, as one line for a person."""


class LoadError(Exception):
    """The message says what, and what to do where that is known."""
