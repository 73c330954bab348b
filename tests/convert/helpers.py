"""The goldens, and how tests read them. `tests/goldens/make.py` makes them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.convert import gguf
from MaxText.convert.score import make_batch
from MaxText.convert.source import Source, open_source

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = sorted(folder.name for folder in GOLDENS.iterdir() if (folder / "golden.npz").is_file())
FLOAT32 = {"dtype": "float32", "weight_dtype": "float32"}


def golden(family: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / family / "golden.npz") as file:
        return dict(file)


def source(family: str, **overrides: Any) -> Source:
    return open_source(GOLDENS / family, FLOAT32 | overrides)


def batch(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The golden's three documents: one in a row of its own, two packed into the next."""
    first, *packed = (found[f"tokens_{i}"] for i in range(3))
    segments = np.stack([np.ones_like(first), np.repeat([1, 2], [len(ids) for ids in packed])])
    return make_batch(np.stack([first, np.concatenate(packed)]), segments)


def rows(found: dict[str, np.ndarray], name: str) -> np.ndarray:
    """What the reference says of each document, laid out as `batch` lays out the documents."""
    first, *packed = (found[f"{name}_{i}"] for i in range(3))
    if name == "token_loss":  # the last token of a document has no target
        first, *packed = (np.append(losses, 0.0) for losses in (first, *packed))
    return np.stack([first, np.concatenate(packed)])


# --- GGUF


def write_gguf(path: Path, metadata: dict[str, tuple[int, Any]], tensors: dict[str, np.ndarray]) -> None:
    """A file of float32 tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = gguf.MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, (kind, value) in metadata.items():
        packed = text(value) if kind == 8 else struct.pack({4: "<I", 6: "<f"}[kind], value)
        head += text(key) + struct.pack("<I", kind) + packed
    begin, tensors = 0, {name: array.astype(np.float32) for name, array in tensors.items()}
    for name, array in tensors.items():
        dims = struct.pack(f"<{array.ndim}Q", *reversed(array.shape))
        head += text(name) + struct.pack("<I", array.ndim) + dims + struct.pack("<IQ", 0, begin)
        begin += array.nbytes
    body = b"".join(array.astype("<f4").tobytes() for array in tensors.values())
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of queries and keys."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


LLAMA_GGUF: dict[str, tuple[int, Any]] = {
    "general.architecture": (8, "llama"), "llama.embedding_length": (4, 32), "llama.block_count": (4, 1),
    "llama.feed_forward_length": (4, 48), "llama.attention.head_count": (4, 4), "llama.context_length": (4, 64),
    "llama.attention.head_count_kv": (4, 2), "llama.attention.layer_norm_rms_epsilon": (6, 1e-5),
    "llama.rope.freq_base": (6, 1e5),
}  # fmt: skip
LLAMA_TENSORS = {
    "token_embd": (96, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
    "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
    "blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48),
}  # fmt: skip


def llama_gguf(path: Path, metadata: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Any:
    """Write a tiny random Llama as llama.cpp does, with these changes; return its weights in Hugging Face's order."""
    rng = np.random.default_rng(0)
    plain = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in LLAMA_TENSORS.items()}
    stored = dict(plain)
    for name, heads in (("blk.0.attn_q.weight", 4), ("blk.0.attn_k.weight", 2)):
        stored[name] = llama_cpp_order(plain[name], heads)
    write_gguf(path, LLAMA_GGUF | (metadata or {}), stored | (tensors or {}))
    return plain
