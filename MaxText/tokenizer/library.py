"""Libraries that only some data need: imported when they are, and asked for by name when they are not there."""

from __future__ import annotations

import importlib
from types import ModuleType

from MaxText.errors import DataError


def need(module: str, package: str, what: str) -> ModuleType:
    """Module `module` of `package`, which `what` needs. DataError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = "" if error.name in (None, module.partition(".")[0]) else f" ({error})"
        raise DataError(
            f"{what} needs the library {package}, which is not installed{missing}: pip install {package}",
            id="data.no-library",
        ) from error
