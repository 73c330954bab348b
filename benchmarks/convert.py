"""What `import` and `export` hold in memory, and how fast they go, for models of more and more layers. One JSON line.

    python -m benchmarks.convert [layers=2,8,32] [width=512] [folder=/tmp]

Each verb runs in a process of its own; `peak_bytes` is the high-water mark of its resident memory less what the process
needs before the first weight is read. `largest_bytes` is the largest tensor or array that is read at once: of the dense
model the embedding, of the model of experts one layer's experts in one of their three matrices.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 4096


def model(kind: str, layers: int, width: int) -> dict[str, Any]:
    """A config.json."""
    theirs = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": width,
        "intermediate_size": 3 * width, "num_hidden_layers": layers, "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "tie_word_embeddings": True,
    }  # fmt: skip
    if kind == "experts":
        theirs |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16}
        theirs |= {"num_experts_per_tok": 2, "moe_intermediate_size": width // 4, "norm_topk_prob": True}
    return theirs


def write_source(folder: Path, theirs: dict[str, Any]) -> None:
    """A Hugging Face folder of random weights, written tensor by tensor."""
    from MaxText import config, decoder
    from MaxText.convert import hf_config, mapping, safetensors

    folder.mkdir()
    (folder / hf_config.NAME).write_text(json.dumps(theirs))
    family, recipe = hf_config.read(theirs)
    cfg = config.make(**recipe)
    links = mapping.make(cfg, decoder.declare(cfg), family.rows, family.name).names()
    rng = np.random.default_rng(0)
    wanted = [safetensors.Wanted(link.name, np.dtype(np.float32), link.shape) for link in links.values()]
    safetensors.write_folder(folder, wanted, lambda name: rng.standard_normal(links[name].shape, np.float32))


def resident() -> int:
    """Bytes of resident memory at most so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def one(verb: str, src: str, out: str) -> None:
    """Runs in a process of its own; prints what it took."""
    from MaxText.convert import transfer
    from MaxText.convert.source import open_source

    described = open_source(Path(src), {})
    import orbax.checkpoint  # noqa: F401  a library that the first save would import
    import tensorstore  # noqa: F401

    before, begun = resident(), time.perf_counter()
    {"import": transfer.import_model, "export": transfer.export_model}[verb](Path(src), Path(out), {})
    seconds = time.perf_counter() - begun
    print(json.dumps({"peak_bytes": resident() - before, "seconds": seconds, "kind": described.kind}))


def run(verb: str, src: Path, out: Path) -> dict[str, Any]:
    """`one` in a new process."""
    command = [sys.executable, "-m", "benchmarks.convert", verb, str(src), str(out)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(folder: Path, kind: str, layers: int, width: int) -> dict[str, Any]:
    """Import and export of one model."""
    source = folder / f"{kind}-{layers}"
    write_source(source, model(kind, layers, width))
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    took = {"import": run("import", source, folder / "in"), "export": run("export", folder / "in", folder / "out")}
    return {
        "layers": layers,
        "bytes": size,
        **{f"{verb}_peak_bytes": found["peak_bytes"] for verb, found in took.items()},
        **{f"{verb}_bytes_per_second": round(size / found["seconds"]) for verb, found in took.items()},
    }


def main() -> None:
    """Read key=value arguments, print one JSON line."""
    if sys.argv[1:2] in (["import"], ["export"]):
        return one(*sys.argv[1:4])
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    width, numbers = int(given.get("width", 512)), [int(n) for n in given.get("layers", "2,8,32").split(",")]
    found: dict[str, Any] = {"benchmark": "convert", "largest_bytes": 4 * max(VOCAB * width, 16 * width**2 // 4)}
    for kind in ("dense", "experts"):
        found[kind] = []
        for layers in numbers:
            with tempfile.TemporaryDirectory(dir=given.get("folder")) as folder:
                found[kind].append(measure(Path(folder), kind, layers, width))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
