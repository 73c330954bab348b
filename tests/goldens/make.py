"""Makes the goldens of this folder: tiny random models of the reference implementation, and what they compute.

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    /tmp/hf/bin/python tests/goldens/make.py [FAMILY ...]

Each family's folder holds config.json, the weights as the reference saves them, and golden.npz: documents, and their
logits and per-token losses, each document run by itself; the norms of the gradients of the mean loss under the names of
the saved tensors; and a greedy continuation. Nothing else here needs torch.

Every weight is *hot*: norms, biases, sinks and correction biases are random too, so that none can be forgotten unseen.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

HERE = Path(__file__).parent
VOCAB = 96
LENGTHS = (24, 14, 10)  # the last two are packed into one row
PROMPT, NEW = 8, 12

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 8,
}
# Here the share of stretched frequency grows over several pairs, so that its borders and their rounding are seen.
RAMP = YARN | {"rope_theta": 20.0, "original_max_position_embeddings": 32}
MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"rope_parameters": PLAIN_ROPE, "sliding_window": 6}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN_ROPE, "head_dim": None, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_parameters": PLAIN_ROPE}),
    "gemma": ("Gemma", {"rope_parameters": PLAIN_ROPE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "rope_parameters": PLAIN_ROPE,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "sliding_window": 6,
            "num_hidden_layers": 8,
            "query_pre_attn_scalar": 12,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "sliding_window": 6,
            "num_hidden_layers": 6,
            "intermediate_size": 40,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
            "final_logit_softcapping": 3.0,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_small": (
        "Gemma4Text",
        {
            "sliding_window": 6,
            "num_hidden_layers": 6,
            "global_head_dim": 16,
            "final_logit_softcapping": 3.0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {"rope_parameters": PLAIN_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "rope_parameters": PLAIN_ROPE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**MLA, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "group_limited_greedy", "n_group": 4}
        | {"topk_group": 2, "routed_scaling_factor": 2.0},
    ),
    "deepseek_v3": ("DeepseekV3", {**MLA, "n_group": 4, "topk_group": 2}),
    "gpt_oss": (
        "GptOss",
        {
            "rope_parameters": {**RAMP, "truncate": False},
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "swiglu_limit": 0.5,
        },
    ),
    "olmo2": ("Olmo2", {"rope_parameters": PLAIN_ROPE}),
    "olmo3": (
        "Olmo3",
        {
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN_ROPE},
            "sliding_window": 6,
            "num_hidden_layers": 5,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "rope_parameters": LLAMA3,
            "num_hidden_layers": 5,
            "attention_chunk_size": 6,
            "intermediate_size": 16,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attn_temperature_tuning": True,
            "floor_scale": 8,
            "attn_scale": 0.3,
            "use_qk_norm": True,
        },
    ),
    "ministral3": (
        "Ministral3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}
        | {"tie_word_embeddings": True},
    ),
    "mistral4": (
        "Mistral4",
        {**MLA, "first_k_dense_replace": 0, "head_dim": 16}
        | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {**MLA, "n_group": 4, "topk_group": 2, "index_n_heads": 12, "index_head_dim": 12, "index_topk": 5},
    ),
    "gpt2": (
        "GPT2",
        {key: None for key in SMALL if key.startswith(("num_", "hidden", "intermediate", "head", "max_"))}
        | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "n_inner": 48, "tie_word_embeddings": True}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "kimi_k2": (
        "DeepseekV3",
        {**MLA, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
        | {"rope_parameters": {**RAMP, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}
BFLOAT16 = ("mistral", "mixtral")
NAMED = {"kimi_k2": "kimi_k2"}  # model_type, where the release calls the same class otherwise
SHARDED = {"mixtral": "60KB", "llama": "60KB"}


def heat(model: Any, seed: int) -> None:
    """Fill every weight with random values of a size that lets all of them matter."""
    generator = torch.Generator().manual_seed(seed)
    unit_offset = type(model).__name__.startswith(("Gemma3", "Gemma2", "GemmaF"))
    tensors = dict(model.named_parameters())
    hot = ("correction_bias", "layer_scalar", "per_expert_scale")
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(hot)}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("layer_scalar"):
            value = 1.0 + 0.2 * noise
        elif "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
            value = 0.3 * noise + (0.0 if unit_offset else 1.0)
        elif name.endswith("correction_bias"):
            value = 0.2 * noise
        elif tensor.ndim == 1:  # biases, sinks
            value = 0.5 * noise
        elif "embed" in name or "experts" in name:
            value = noise * tensor.shape[-1] ** -0.5
        else:
            value = 1.5 * noise * tensor.shape[-1] ** -0.5
        with torch.no_grad():
            tensor.copy_(value)


def documents(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randint(3, VOCAB, (1, length), generator=generator) for length in LENGTHS]


def saved_names(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """`tensors`, which have the names of the model in memory, under the names and in the pieces of the saved model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=tensors)
        found: dict[str, np.ndarray] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            found |= load_file(file)
    return found


def compute(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Everything that golden.npz holds."""
    out: dict[str, np.ndarray] = {}
    losses = []
    for number, ids in enumerate(documents(seed)):
        logits = model(ids, use_cache=False).logits.float()
        nll = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
        losses.append(nll)
        out |= {
            f"tokens_{number}": ids[0].numpy().astype(np.int32),
            f"logits_{number}": logits[0].detach().numpy(),
            f"token_loss_{number}": nll.detach().numpy(),
        }
    loss = torch.cat(losses).mean()
    loss.backward()
    out["loss"] = loss.detach().numpy()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in saved_names(model, gradients).items():
        out[f"gradient/{name}"] = np.float32(np.linalg.norm(gradient.astype(np.float64)))
    out["greedy"] = greedy(model, documents(seed)[0][:, :PROMPT])
    return out


@torch.no_grad()
def greedy(model: Any, ids: torch.Tensor) -> np.ndarray:
    """Prompt and continuation, without a cache."""
    for _ in range(NEW):
        following = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], 1)
    return ids[0].numpy().astype(np.int32)


def make(family: str, seed: int) -> None:
    kind, differences = FAMILIES[family]
    settings = SMALL | differences
    given = {key: value for key, value in settings.items() if value is not None or key == "q_lora_rank"}
    config = getattr(transformers, f"{kind}Config")(**given)
    config._attn_implementation = "eager"
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind.removesuffix('Text')}{head}")(config).float().eval()
    heat(model, seed)
    if family in BFLOAT16:
        with torch.no_grad():  # not model.bfloat16(), which would round the frequencies of rope as well
            for tensor in model.parameters():
                tensor.copy_(tensor.bfloat16())
    results = compute(model, seed)
    folder = HERE / family
    stored = model.bfloat16() if family in BFLOAT16 else model
    stored.save_pretrained(folder, max_shard_size=SHARDED.get(family, "1GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if family in NAMED:
        content = json.loads((folder / "config.json").read_text()) | {"model_type": NAMED[family]}
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    np.savez_compressed(folder / "golden.npz", **results)
    size = sum(file.stat().st_size for file in folder.iterdir())
    largest = np.abs(results["logits_0"]).max()
    print(f"{family}: {size:,} bytes, loss {results['loss']:.4f}, largest logit {largest:.2f}")


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        make(name, list(FAMILIES).index(name))
