"""Asking the real compiler, without the machine."""
