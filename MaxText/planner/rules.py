"""The axes of the mesh, and the table from logical dims to them."""

from __future__ import annotations

from MaxText.layout import Layout

# Every axis always exists; size 1 is a size. Outermost first, so that tensor neighbours are physical neighbours.
MESH_AXES = ("pipeline", "data", "fsdp", "fsdp_transpose", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "fsdp_transpose", "expert")
ZERO_AXES = ("fsdp", "fsdp_transpose", "expert")
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embed", ZERO_AXES),
    ("vocab", ("tensor",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
    ("head_dim", ()),
    ("norm", ()),
    ("head_norm", ()),
    ("layers", ()),
    ("positions", ()),
    ("latent", ZERO_AXES),
    ("experts", ("expert",)),
    ("moe_embed", ("fsdp", "fsdp_transpose")),
    ("moe_mlp", ("tensor",)),
    ("activation_batch", BATCH_AXES),
    ("activation_length", ("context",)),
    ("activation_embed", ()),
    ("activation_heads", ("tensor",)),
    ("activation_kv_heads", ("tensor",)),
    ("activation_mlp", ("tensor",)),
    ("activation_vocab", ("tensor",)),
)


def make_layout(mesh_shape: dict[str, int]) -> Layout:
    """The project's rules on a mesh of this shape."""
    return Layout(RULES, tuple(mesh_shape.items()), frozenset(ZERO_AXES))
