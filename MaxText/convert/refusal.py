"""A config.json that says what we cannot express is refused by name, never guessed."""

from __future__ import annotations


class Refusal(Exception):
    """What stands at `key` cannot be expressed; `why`."""

    def __init__(self, key: str, why: str):
        super().__init__(f"{key}: {why}")
        self.key, self.why = key, why
