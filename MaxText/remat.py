"""What the backward pass finds in memory, and what it computes again: one table for the program and for the planner.

Every intermediate that can be kept has a name (`checkpoint_name` in the layers). A policy says for each: `device` (kept
beside the parameters), `offload` (kept in the host's memory, copied out and back beside the computation), `remat`
(computed again). The names of the policies are MaxText's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.ad_checkpoint  # not an attribute of jax by itself

Place = Literal["device", "offload", "remat"]

PROJECTIONS = ("query_proj", "key_proj", "value_proj", "query_wa_proj", "kv_wa_proj", "kv_proj")
EXPERTS = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")
FEED_FORWARD = ("mlpwi_0", "mlpwi_1", "mlpwo", *EXPERTS)
LAYER_INPUT = "decoder_layer_input"
CONTEXT = "attention_out"  # before its projection; the key's name is MaxText's, `context`
NAMES = (LAYER_INPUT, *PROJECTIONS, CONTEXT, "out_proj", *FEED_FORWARD)
KEYS = tuple("context" if name == CONTEXT else name for name in NAMES)

# What each policy keeps on the device, and in the host's memory. The input of a layer is always kept somewhere.
_POLICIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": ((), ()),
    "minimal": ((*PROJECTIONS, "out_proj", *FEED_FORWARD), ()),
    "minimal_with_context": ((*PROJECTIONS, CONTEXT, "out_proj", *FEED_FORWARD), ()),
    "save_dot_except_mlpwi": ((*PROJECTIONS, "out_proj", "mlpwo", "moe_mlpwo"), ()),
    "save_dot_except_mlp": ((*PROJECTIONS, "out_proj"), ()),
    "save_qkv_proj": (PROJECTIONS, ()),
    "save_out_proj": (("out_proj",), ()),
    "qkv_proj_offloaded": ((), PROJECTIONS),
    "minimal_offloaded": ((), (*PROJECTIONS, "out_proj", *FEED_FORWARD)),
}
POLICIES = ("none", *_POLICIES, "custom")


def places(cfg: Any) -> Mapping[str, Place]:
    """Where each name is kept; for remat_policy=none everything stays on the device."""
    if cfg.remat_policy == "none":
        return dict.fromkeys(NAMES, "device")
    if cfg.remat_policy == "custom":
        return {name: getattr(cfg, "context" if name == CONTEXT else name) for name in NAMES}
    kept, offloaded = _POLICIES[cfg.remat_policy]
    found: dict[str, Place] = dict.fromkeys(NAMES, "remat")
    found |= dict.fromkeys(kept, "device")
    found |= dict.fromkeys(offloaded, "offload")
    return found | {LAYER_INPUT: "device"}


def offloads(cfg: Any) -> bool:
    """Whether anything is kept in the host's memory."""
    return "offload" in places(cfg).values()


def policy(cfg: Any, in_a_loop: bool = False) -> Callable[..., Any]:
    """The same for `jax.checkpoint`; not for remat_policy=none, which needs none.

    A layer's input on the device needs no name: it is what `jax.checkpoint` keeps anyway. It does where the checkpoint
    wraps a whole turn in a loop (of a pipeline), whose layers are then checkpointed once more, by the same policy."""
    found = places(cfg)
    device = [name for name in NAMES if found[name] == "device" and (in_a_loop or name != LAYER_INPUT)]
    host = [name for name in NAMES if found[name] == "offload"]
    if not host:
        return jax.checkpoint_policies.save_only_these_names(*device)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=device,
        names_which_can_be_offloaded=host,
        offload_src="device",
        offload_dst="pinned_host",
    )
