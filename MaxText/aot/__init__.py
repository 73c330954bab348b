"""Asking the real compiler, without the machine."""

from MaxText.aot.compile import Compiled, compile_step, prepare
from MaxText.aot.report import as_dict, ask, keep, text

__all__ = ["Compiled", "as_dict", "ask", "compile_step", "keep", "prepare", "text"]
