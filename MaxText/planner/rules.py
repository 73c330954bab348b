"""The axes of the mesh, and the table from logical dims to them."""

from __future__ import annotations

from MaxText.layout import STAGE_LAYERS, Layout

# Every axis always exists; size 1 is a size. Outermost first, so that tensor neighbours are physical neighbours.
MESH_AXES = ("pipeline", "data", "fsdp", "fsdp_transpose", "expert", "context", "tensor")
# Outside the pipeline the batch is split over its stages too, so that each embeds and predicts its own rows.
BATCH_AXES = ("pipeline", "data", "fsdp", "fsdp_transpose", "expert")
# The pipeline comes last: a stage that takes its layers' pieces from all stages then gets one run of each dim.
ZERO_AXES = ("fsdp", "fsdp_transpose", "expert", "pipeline")
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
    (STAGE_LAYERS, ()),
    ("positions", ()),
    ("latent", ZERO_AXES),
    ("experts", ()),
    ("moe_mlp", ("tensor",)),
    ("activation_batch", BATCH_AXES),
    ("activation_length", ("context",)),
    ("activation_embed", ()),
    ("activation_heads", ("tensor",)),
    ("activation_kv_heads", ("tensor",)),
    ("activation_mlp", ("tensor",)),
    ("activation_vocab", ("tensor",)),
)


def make_layout(mesh_shape: dict[str, int], stages_own: bool = False) -> Layout:
    """The project's rules on a mesh of this shape; `stages_own`: each stage of the pipeline stores its own layers."""
    rules = tuple((dim, ("pipeline",) if dim == STAGE_LAYERS and stages_own else axes) for dim, axes in RULES)
    return Layout(rules, tuple(mesh_shape.items()), frozenset(ZERO_AXES))
