"""`python train.py CONFIG [key=value ...]`: read the configuration, prepare the process, walk; one exit code for every
ending.

Nothing heavy is imported before the configuration is known to be valid, so a mistake in it is answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from MaxText import config, runtime
from MaxText.errors import MaxTextError, StorageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run training; returns the exit code (`MaxText.errors` lists them; 0: all steps done)."""
    try:
        cfg = config.load(sys.argv[1:] if argv is None else argv)
        runtime.prepare(cfg)
        from MaxText import walk

        return walk.walk(cfg)
    except MaxTextError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{error.filename or 'a file'}: {error.strerror or error}. Nothing more was written.", file=sys.stderr)
        return StorageError.exit_code
    except KeyboardInterrupt:
        print("interrupted before the run began; nothing was written.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
