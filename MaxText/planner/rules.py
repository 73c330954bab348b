"""The axes of the mesh, and the table from logical dims to them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from MaxText.errors import PlanError
from MaxText.layout import Layout

# Every axis always exists; size 1 is a size. Outermost first, so that tensor neighbours are physical neighbours.
MESH_AXES = ("pipeline", "data", "fsdp", "fsdp_transpose", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "fsdp_transpose", "expert")
ZERO_AXES = ("fsdp", "fsdp_transpose", "expert")
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embed", ZERO_AXES),
    ("mlp_embed", ("fsdp", "expert")),
    ("vocab", ("tensor",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    # fsdp_transpose splits the other dim of the feed-forward kernels. The axis in use is major: gathering moves least.
    ("mlp", ("tensor", "fsdp_transpose")),
    ("head_dim", ()),
    ("norm", ()),
    ("head_norm", ()),
    ("layers", ()),
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


def table(written: Sequence[str] = ()) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """RULES with the user's rows in place of ours; a row is `dim=axis+axis`, major axis first, or `dim=` for whole.

    Raises:
      PlanError: a row of another form, a dim or an axis that does not exist, a dim or an axis twice; all at once."""
    rules, problems = dict(RULES), []
    seen: set[str] = set()
    for row in written:
        dim, equals, right = row.replace(" ", "").partition("=")
        axes = tuple(right.split("+")) if right else ()
        if not equals:
            problems.append(f"{row!r} is no rule; write dim=axis+axis, such as embed=fsdp+expert.")
        elif dim not in rules:
            problems.append(f"{row!r}: nothing has a dim {dim!r}{_near(dim, rules)}. Dims: {', '.join(rules)}.")
        elif unknown := [axis for axis in axes if axis not in MESH_AXES]:
            near = _near(unknown[0], MESH_AXES)
            problems.append(f"{row!r}: the mesh has no axis {unknown[0]!r}{near}. Axes: {', '.join(MESH_AXES)}.")
        elif len(set(axes)) < len(axes) or dim in seen:
            problems.append(f"{row!r}: {'an axis' if dim not in seen else f'the dim {dim!r}'} stands twice; keep one.")
        else:
            rules[dim] = axes
        seen.add(dim)
    if problems:
        raise PlanError("\n".join(f"logical_axis_rules: {problem}" for problem in problems), id="plan.rule")
    return tuple(rules.items())


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def make_layout(mesh_shape: Mapping[str, int], rules: Sequence[str] = ()) -> Layout:
    """The table, with the user's `rules` in it, on a mesh of this shape."""
    return Layout(table(rules), tuple(mesh_shape.items()), frozenset(ZERO_AXES))
