"""`python train.py CONFIG [key=value ...]`: read the configuration, prepare the process, walk; one exit code for every
ending.

Nothing heavy is imported before the configuration is known to be valid, so a mistake in it is answered at once.
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

from MaxText import __version__, config, processes, runtime
from MaxText.errors import MaxTextError, StorageError
from MaxText.processes import Alone, Group, Several


def main(argv: Sequence[str] | None = None) -> int:
    """Run training; returns the exit code (`MaxText.errors` lists them; 0: all steps done)."""
    group: Group = Alone()
    code, text = 0, ""
    try:
        cfg = config.load(sys.argv[1:] if argv is None else argv)
        group = _join(cfg)
        _walk(cfg, group)
    except MaxTextError as error:
        code, text = error.exit_code, str(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        text = f"{error.filename or 'a file'}: {error.strerror or error}. Nothing more was written."
        code = StorageError.exit_code
    except KeyboardInterrupt:
        code, text = 130, "interrupted before the run began; nothing was written."
    except Exception as error:
        if isinstance(group, Alone):
            raise
        traceback.print_exc()
        code, text = 1, f"an unexpected error: {error}"
    return _end(group, code, text)


def _join(cfg: config.Config) -> Group:
    """Call the roll, before anything heavy is imported."""
    libraries = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    return processes.join(
        processes.find(os.environ),
        {"version": __version__, "python": platform.python_version(), **libraries, **cfg.as_dict()},
        start=cfg.jax_distributed_initialization_timeout,
        heartbeat=cfg.jax_distributed_heartbeat_timeout_seconds,
        wait=cfg.process_wait_timeout,
    )


def _walk(cfg: config.Config, group: Group) -> None:
    runtime.prepare(cfg, group.count)
    if isinstance(group, Several):
        runtime.connect(cfg, group)
    from MaxText import walk

    walk.walk(cfg, group)


def _end(group: Group, code: int, text: str) -> int:
    """Take leave of the others; say why this ended, once for all where all have the same reason."""
    speaks = group.leave(code, text)
    if text and speaks:
        print(text, file=sys.stderr)
    if code and isinstance(group, Several):  # JAX's own farewell would wait for those that are stuck
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
