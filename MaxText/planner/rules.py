"""The axes of the mesh, and the table from logical dims to them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from MaxText.errors import PlanError
from MaxText.layout import STAGE_LAYERS, Layout

# Every axis always exists; size 1 is a size. Outermost first, so that tensor neighbours are physical neighbours.
MESH_AXES = ("pipeline", "data", "fsdp", "fsdp_transpose", "expert", "context", "tensor")
# Outside the pipeline the batch is split over its stages too, so that each embeds and predicts its own rows.
BATCH_AXES = ("pipeline", "data", "fsdp", "fsdp_transpose", "expert")
# The pipeline comes last: a stage that takes its layers' pieces from all stages then gets one run of each dim.
ZERO_AXES = ("fsdp", "fsdp_transpose", "expert", "pipeline")
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embed", ZERO_AXES),
    ("mlp_embed", ("fsdp", "expert", "pipeline")),
    ("vocab", ("tensor",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    # fsdp_transpose splits the other dim of the feed-forward kernels. The axis in use is major: gathering moves least.
    ("mlp", ("tensor", "fsdp_transpose")),
    ("head_dim", ()),
    ("norm", ()),
    ("head_norm", ()),
    ("layers", ()),
    (STAGE_LAYERS, ()),
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


# Dims of weights that a user may split otherwise, and over which axes. Axes of the batch are gathered for use, so any
# dim may have them; heads, feed-forward and vocabulary may also stay split in use.
STORED_DIMS = ("embed", "mlp_embed", "latent", "norm", "head_norm", "head_dim", "positions")
LEGAL_AXES = dict.fromkeys(STORED_DIMS, BATCH_AXES) | dict.fromkeys(
    ("vocab", "heads", "kv_heads", "mlp"), (*BATCH_AXES, "tensor")
)


def table(written: Sequence[str] = ()) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """RULES with the user's rows in place of ours; a row is `dim=axis+axis`, major axis first, or `dim=` for whole.

    Raises:
      PlanError: a row of another form, a dim or an axis that is not the user's, one that stands twice; all at once."""
    rows = [row.replace(" ", "").partition("=") for row in written]
    split = [(dim, tuple(right.split("+")) if right else ()) for dim, _, right in rows]
    earlier = [{dim for dim, _ in split[:i]} for i in range(len(split))]
    problems = [
        f"logical_axis_rules: {row!r}: {problem}"
        for row, (dim, axes), seen in zip(written, split, earlier, strict=True)
        if (problem := _problem("=" in row, dim, axes, seen))
    ]
    if problems:
        raise PlanError("\n".join(problems), id="plan.rule")
    return tuple((dict(RULES) | dict(split)).items())


def _problem(has_sides: bool, dim: str, axes: tuple[str, ...], seen: set[str]) -> str:
    if not has_sides:
        return "no rule; write dim=axis+axis, such as embed=fsdp+expert."
    if dim not in LEGAL_AXES:
        return (
            f"no dim {dim!r} that can be split otherwise{_near(dim, LEGAL_AXES)}. Legal here: {', '.join(LEGAL_AXES)}."
        )
    for axis in axes:
        if axis not in LEGAL_AXES[dim]:
            near = _near(axis, LEGAL_AXES[dim])
            return f"{dim} cannot be split over {axis!r}{near}. Legal here: {', '.join(LEGAL_AXES[dim])}."
    if "pipeline" in axes[:-1]:
        return "pipeline comes last, so that a stage can put its layers together."
    if dim in seen or len(set(axes)) < len(axes):
        return f"{'the dim' if dim in seen else 'an axis'} stands twice; keep one."
    return ""


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def legal(size: int, limit: int = 4096) -> str:
    """The degrees that divide a size, as a list in words."""
    return ", ".join(str(n) for n in range(1, min(size, limit) + 1) if size % n == 0)


def make_layout(mesh_shape: Mapping[str, int], rules: Sequence[str] = (), stages_own: bool = False) -> Layout:
    """The table, with the user's `rules` in it, on a mesh of this shape; `stages_own`: each stage of the pipeline
    stores its own layers."""
    rows = dict(table(rules)) | ({STAGE_LAYERS: ("pipeline",)} if stages_own else {})
    return Layout(tuple(rows.items()), tuple(mesh_shape.items()), frozenset(BATCH_AXES))
