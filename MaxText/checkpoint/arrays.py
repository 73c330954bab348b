"""Arrays between devices, host and Orbax's files: the only place that knows Orbax.

Orbax's zarr layout without OCDBT and without compression: one folder per array, so that a damaged file names its
array; weights compress by 8 % only, for twice the time. Orbax keeps no checksum of array bytes and returns changed
ones without a word, hence the manifest's.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from MaxText.checkpoint.manifest import File, crc
from MaxText.checkpoint.tree import nest

Host = Mapping[str, np.ndarray]
T = TypeVar("T")
_THREADS = min(8, max(4, os.cpu_count() or 1))  # more than cores: some of them wait for the disk


@cache
def _workers() -> ThreadPoolExecutor:
    """Threads for copies, reading and checksums; all release Python's lock."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-bytes")


def to_host(named: Mapping[str, Any], reuse: Host) -> dict[str, np.ndarray]:
    """Copy the arrays `named` to host memory of our own; complete on return, so the arrays may be donated.

    Buffers of `reuse` are overwritten where they fit: memory that the system has handed out already is five times
    as fast as new memory.
    """
    for array in named.values():
        if hasattr(array, "copy_to_host_async"):
            array.copy_to_host_async()
    return dict(zip(named, _workers().map(lambda name: _copy(named[name], reuse.get(name)), named), strict=True))


def _copy(array: Any, buffer: np.ndarray | None) -> np.ndarray:
    if buffer is None or buffer.shape != array.shape or buffer.dtype != array.dtype:
        buffer = np.empty(array.shape, array.dtype)
    if not hasattr(array, "addressable_shards"):
        np.copyto(buffer, array)
        return buffer
    assert array.is_fully_addressable or array.is_fully_replicated, "several processes save in pieces"
    for shard in array.addressable_shards:
        if shard.replica_id == 0 or not array.is_fully_addressable:
            buffer[shard.index] = np.asarray(shard.data)
    return buffer


def start_checksums(host: Host) -> dict[str, Future[str]]:
    """Begin to compute the CRC-32 of each array's bytes in C order, in other threads."""
    return {name: _workers().submit(_crc, array) for name, array in host.items()}


def _crc(array: np.ndarray) -> str:
    return crc(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def require_read_back(files: Mapping[str, File], sizes: Mapping[str, int], crcs: Mapping[str, Future[str]]) -> None:
    """OSError unless each file of `sizes` bytes, the whole of an array, has that array's checksum."""
    for path, nbytes in sizes.items():
        if nbytes and files[path].size == nbytes and files[path].crc != crcs[path].result():
            raise OSError(errno.EIO, f"array {path} did not read back as it was written", path)


def write(folder: Path, host: Host) -> None:
    """Write `host` to the new folder `folder`, which appears when it is complete. Raises what Orbax raises.

    Of several processes only this one takes part.
    """
    import orbax.checkpoint as ocp

    _hush_stragglers()
    with _checkpointer() as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(nest(host)))


def ahead(work: Callable[[str], T], names: Iterable[str]) -> Iterator[T]:
    """`work` of each name in order, done by threads, a few ahead of what is taken. Raises what `work` raises."""
    waiting: deque[Future[T]] = deque()
    try:
        for name in names:
            waiting.append(_workers().submit(work, name))
            if len(waiting) > 2 * _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(_needed)
    import jax

    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"p{me}")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _needed(record: logging.LogRecord) -> bool:
    """Drop two of Orbax's messages: that there is nothing to merge, which is how this layout is, and the traceback of
    an exception in its threads, which is raised to us as well."""
    message = record.getMessage()
    return "Skipping merge of OCDBT" not in message and "_SignalingThread.run() raised" not in message


@cache
def _hush_stragglers() -> None:
    """Keep writes that end after another has failed from printing tracebacks: TensorStore's threads report them to an
    event loop that Orbax has closed by then, one "unraisable" RuntimeError each. The failure itself is raised."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook


@cache
def versions() -> dict[str, str]:
    """Return the versions of what writes a checkpoint."""
    import platform
    from importlib.metadata import version

    import MaxText

    libraries = {name: version(name) for name in ("jax", "orbax-checkpoint", "numpy")}
    return {"maxtext": MaxText.__version__, "python": platform.python_version(), **libraries}
