"""The decoder: a model as segments of repeated layer patterns.

`llama -> 32 x (layer)`, `gemma3 -> 5 x (5 local, 1 global), 4 x (local)`, `deepseek -> 3 x (dense), 58 x (moe)`: see
`architecture`. The parameters of a segment are stacked over its repeats, and `lax.scan` runs over them; with
scan_layers=false the same loop is unrolled, on the same parameters, with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from MaxText import architecture, blueprint, pipeline, remat, sequence
from MaxText.architecture import Segment, segments
from MaxText.blueprint import Param, fan_in, normal
from MaxText.layers import attend, attention, block, dropout, embedding, layer_input, masks, mla, norm, rope
from MaxText.layers.attention import Cache, Context
from MaxText.layers.masks import Places
from MaxText.layers.router import Routing
from MaxText.layout import STAGE_LAYERS, Axes, Layout, project

LOGITS: Axes = ("embed", "vocab")
PAIR: Axes = (None, "embed", None)
Rows = Mapping[str, Int[Array, "B S"]]


class Output(NamedTuple):
    """What a forward pass gives.

    The hidden states after the last norm, and those of each further prediction; routing statistics of the layers that
    have experts, {path of the layer in the parameters: Routing, stacked over repeats}; the sum over layers and tokens
    of what the indexers have to learn."""

    hidden_BSD: Float[Array, "B S D"]
    further_BSD: tuple[Float[Array, "B S D"], ...]
    routing: dict[str, Routing]
    index_loss: Float[Array, ""] | float


def declare(cfg: Any) -> dict[str, Any]:
    """The blueprint of the whole model: `{embedding, decoder: {segment: {position: layer}}, final_norm[, logits]}`."""
    stacks = {segment.name: _declare_segment(cfg, segment) for segment in segments(cfg)}
    tree: dict[str, Any] = {"embedding": embedding.declare(cfg)}
    if cfg.trainable_position_size != -1:
        tree["positions"] = embedding.declare_positions(cfg)
    if cfg.hidden_size_per_layer_input:
        tree["layer_inputs"] = layer_input.declare_shared(cfg)
    tree |= {"decoder": stacks, "final_norm": norm.declare_stream(cfg, cfg.emb_dim)}
    if not cfg.logits_via_embedding:
        tree["logits"] = Param((cfg.emb_dim, cfg.vocab_size), LOGITS, normal(cfg.emb_dim**-0.5))
    if cfg.mtp_num_layers:
        tree["mtp"] = {str(i): _declare_further(cfg) for i in range(cfg.mtp_num_layers)}
    return tree


def _declare_segment(cfg: Any, segment: Segment) -> dict[str, Any]:
    dim = STAGE_LAYERS if segment == pipeline.pipelined_segment(cfg) else "layers"
    return {
        str(i): blueprint.stack(block.declare(cfg, spec), segment.repeats, dim)
        for i, spec in enumerate(segment.pattern)
    }


def _declare_further(cfg: Any) -> dict[str, Any]:
    """One further prediction (multi-token prediction, DeepSeek-V3, arXiv:2412.19437): norms of the next token's
    embedding and of the stream, their projection [2, D, D], a layer like the last of the stack, a final norm."""
    d = cfg.emb_dim
    stream = norm.declare_stream(cfg, d)
    return {
        "embedding_norm": stream,
        "stream_norm": stream,
        "projection": Param((2, d, d), PAIR, fan_in(2 * d, cfg.dense_init_scale)),
        "layer": block.declare(cfg, architecture.further_prediction(cfg)),
        "final_norm": stream,
    }


def _further(
    cfg: Any, layout: Layout, params: Any, x: Array, ids_BS: Array, context: Context
) -> tuple[tuple[Array, ...], dict[str, block.Side]]:
    """Hidden states that predict one token further each, and what their layers leave beside."""
    spec, found, sides = architecture.further_prediction(cfg), [], {}
    for depth in range(cfg.mtp_num_layers):
        own = params["mtp"][str(depth)]
        token = _token(cfg, layout, params, sequence.shift(cfg, layout, ids_BS, depth + 1))
        token = norm.stream_norm(cfg, layout, token, own["embedding_norm"])
        pair = jnp.stack([token, norm.stream_norm(cfg, layout, x, own["stream_norm"])], axis=2)
        x = project(layout, "BSCD,CDE->BSE", pair, own["projection"], PAIR, attention.STREAM)
        x, side = block.block(cfg, spec, layout, own["layer"], x, context.of_layer(cfg.num_decoder_layers + depth))
        found.append(norm.stream_norm(cfg, layout, x, own["final_norm"]))
        sides[f"mtp/{depth}/layer"] = side
    return tuple(found), sides


def _run_segment(
    cfg: Any,
    layout: Layout,
    segment: Segment,
    params: Any,
    x: Array,
    context: Context,
    caches: Any = None,
    lent: Any = None,
    own: Any = None,
    numbers: Any = None,
    real: Any = None,
) -> tuple[Array, Any]:
    """The stream after the repeats that `params` holds, and the layers' sides by position, stacked over repeats. A
    repeat that is not `real` passes the stream by; `numbers` are those of the repeats, if not 0, 1, ..."""
    repeats = jax.tree.leaves((params, caches))[0].shape[0]
    numbers = jnp.arange(repeats) if numbers is None else numbers
    owner = pipeline.make(cfg, layout.size(pipeline.AXIS)) if caches is not None else None
    if owner and owner.owned and owner.segment == segment:
        whole, tree = params, _declare_segment(cfg, segment)
        params, inner = jnp.arange(repeats), layout.inside(pipeline.AXIS)
    else:
        owner, inner = None, layout

    def body(x: Array, slices: tuple[Any, ...]) -> tuple[Array, Any]:
        layer_params, layer_caches, own_vectors, number, counts = slices
        if owner:
            layer_params = pipeline.from_owner(layout, tree, whole, layer_params)
        x, sides = checkpoint_name(x, remat.LAYER_INPUT), {}
        before = x
        for i, spec in enumerate(segment.pattern):
            cache = None if layer_caches is None else layer_caches[str(i)]
            vectors = None if own_vectors is None else own_vectors[i]
            keys = lent.get(spec.reach) if spec.keys == "borrowed" else None
            here = context.of_layer(segment.first + number * len(segment.pattern) + i)
            x, sides[str(i)] = block.block(cfg, spec, inner, layer_params[str(i)], x, here, cache, keys, vectors)
        return (x if counts is None else jnp.where(counts, x, before)), sides

    if caches is None and cfg.remat_policy != "none":
        body = jax.checkpoint(body, policy=remat.policy(cfg), prevent_cse=not cfg.scan_layers)
    return jax.lax.scan(body, x, (params, caches, own, numbers, real), unroll=1 if cfg.scan_layers else repeats)


def _run_pipelined(
    cfg: Any, layout: Layout, schedule: pipeline.Schedule, params: Any, x: Array, rows: Rows, own: Any
) -> tuple[Array, Any]:
    """The same, through the stages of a pipeline; repeats that the schedule leaves out come after it."""
    segment, passing = schedule.segment, schedule.pipelined

    def stage(inner: Layout, params: Any, x: Array, rows: Rows, own: Any, numbers: Array) -> tuple[Array, Any]:
        context, own = _training_context(cfg, inner, rows), _by_repeat(segment, own)
        real = numbers < passing if schedule.padding else None
        return _run_segment(cfg, inner, segment, params, x, context, own=own, numbers=numbers, real=real)

    def checkpoint(iteration: Any) -> Any:
        if cfg.remat_policy == "none":
            return iteration
        return jax.checkpoint(iteration, policy=remat.policy(cfg, in_a_loop=True), prevent_cse=False)

    first = None if own is None else own[: passing * len(segment.pattern)]
    tree = _declare_segment(cfg, segment)
    x, sides = pipeline.run(layout, schedule, tree, stage, params, x, rows, first, checkpoint)
    if passing == segment.repeats:
        return x, sides
    rest = jax.tree.map(lambda p: p[passing:], params)
    left = None if own is None else own[passing * len(segment.pattern) :]
    context = _training_context(cfg, layout, rows)
    own, numbers = _by_repeat(segment, left), jnp.arange(passing, segment.repeats)
    x, more = _run_segment(cfg, layout, segment, rest, x, context, own=own, numbers=numbers)
    return x, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), sides, more)


def _by_repeat(segment: Segment, own_LBSP: Array | None) -> Array | None:
    """The own vectors of the segment's layers, as [repeats, pattern, B, S, P]."""
    return None if own_LBSP is None else own_LBSP.reshape(-1, len(segment.pattern), *own_LBSP.shape[1:])


def _run(
    cfg: Any,
    layout: Layout,
    params: Any,
    x: Array,
    own: Array | None,
    context: Context,
    rows: Rows | None = None,
    caches: Any = None,
) -> tuple[Array, dict[str, Any]]:
    """(the stream after the last layer, {path of a layer: its Side, stacked over repeats}). With `rows`, the positions
    and segments of a batch, it passes the pipeline if there is one."""
    all_sides: dict[str, Any] = {}
    lent: dict[Any, Any] = {}
    schedule = pipeline.make(cfg, layout.size(pipeline.AXIS)) if rows else None
    schedule = schedule and schedule.fitting(x.shape[0], layout.ways("activation_batch"))
    for segment in segments(cfg):
        stack, last = params["decoder"][segment.name], segment.first + segment.repeats * len(segment.pattern)
        vectors = None if own is None else own[segment.first : last]
        if rows and schedule and schedule.segment == segment:
            x, sides = _run_pipelined(cfg, layout, schedule, stack, x, rows, vectors)
        else:
            cache = None if caches is None else caches[segment.name]
            x, sides = _run_segment(cfg, layout, segment, stack, x, context, cache, lent, _by_repeat(segment, vectors))
        all_sides |= {f"decoder/{segment.name}/{i}": side for i, side in sides.items()}
        for spec, side in zip(segment.pattern, sides.values(), strict=True):
            if side.keys is not None:  # such a layer stands alone in its segment
                lent[spec.reach] = Cache(*(stacked[0] for stacked in side.keys))
    return x, all_sides


def _final(cfg: Any, layout: Layout, params: Any, x: Array) -> Array:
    return norm.stream_norm(cfg, layout, x, params["final_norm"])


def _token(cfg: Any, layout: Layout, params: Any, ids_BS: Array) -> Array:
    x = embedding.lookup(layout, params["embedding"], ids_BS, jnp.dtype(cfg.dtype))
    return x * jnp.asarray(cfg.emb_dim**0.5, x.dtype) if cfg.scale_embedding else x


def _embed(cfg: Any, layout: Layout, params: Any, ids_BS: Array, positions_BS: Array) -> tuple[Array, Array | None]:
    """The stream before the first layer, and the layers' own vectors [L, B, S, P] where they have any."""
    x = _token(cfg, layout, params, ids_BS)
    if "positions" in params:
        x = x + embedding.lookup(layout, params["positions"], positions_BS, x.dtype, embedding.POSITIONS)
    own = None
    if "layer_inputs" in params:
        own = layer_input.shared(cfg, layout, params["layer_inputs"], ids_BS, x)
    return x, own


def _context(
    cfg: Any, layout: Layout, q: Places, k: Places, token_BS: Bool[Array, "B S"] | None, slot: Array | None
) -> Context:
    """Rotations and masks for every kind of layer, from the places of queries and keys."""
    specs = {spec for segment in segments(cfg) for spec in segment.pattern}
    ropes = {spec.rope for spec in specs if spec.rope is not None}
    reaches = set() if attend.is_split(layout) else {spec.reach for spec in specs}
    temper = None
    if cfg.temperature_tuning:
        position = q.position_BS.astype(jnp.float32)
        turns = jnp.floor((position + cfg.temperature_tuning_offset) / cfg.temperature_tuning_length)
        temper = 1.0 + cfg.temperature_tuning_scale * jnp.log(1.0 + turns)
    return Context(
        rotations={kind: rope.rotation(q.position_BS, kind) for kind in ropes},
        masks_BST={reach: masks.visible(reach, q, k) for reach in reaches},
        places=q,
        all_places=Places(*(layout.constrain(x, *attend.WHOLE_ROWS) for x in k)),
        temper_BS=temper,
        token_BS=token_BS,
        slot=slot,
    )


def _training_context(cfg: Any, layout: Layout, rows: Rows) -> Context:
    """The context of whole rows, from the positions and documents of their tokens."""
    positions, document = rows["positions"], rows["segments"]
    places = Places(sequence.index(cfg, layout, positions), positions, document)
    return _context(cfg, layout, places, places, document != 0, None)._replace(noise=dropout.noise(rows))


def run(cfg: Any, layout: Layout, params: Any, batch: Mapping[str, Int[Array, "B S"]]) -> Output:
    """Hidden states and routing statistics of a batch; `loss` turns the former into predictions."""
    rows = {name: batch[name] for name in ("positions", "segments", *dropout.KEYS) if name in batch}
    x, own = _embed(cfg, layout, params, batch["inputs"], rows["positions"])
    context = _training_context(cfg, layout, rows)
    x = dropout.dropout(cfg, layout, context.noise, x, dropout.EMBEDDING)
    x, sides = _run(cfg, layout, params, x, own, context, rows)
    further: tuple[Array, ...] = ()
    if cfg.mtp_num_layers:
        further, more = _further(cfg, layout, params, x, batch["inputs"], context)
        sides |= more
    return Output(
        _final(cfg, layout, params, x),
        further,
        {path: side.routing for path, side in sides.items() if side.routing is not None},
        sum(side.index_loss.sum() for side in sides.values() if side.index_loss is not None),
    )


def forward(cfg: Any, layout: Layout, params: Any, batch: Mapping[str, Int[Array, "B S"]]) -> Float[Array, "B S D"]:
    """The hidden states alone (the compiler drops what else `run` makes)."""
    return run(cfg, layout, params, batch).hidden_BSD


def output_kernel(cfg: Any, params: Any) -> tuple[Float[Array, "D V"], Axes, float]:
    """(kernel, its dims, factor on the logits). Tied to the embedding, the kernel is its transpose."""
    if not cfg.logits_via_embedding:
        return params["logits"], LOGITS, 1.0
    # The barrier keeps XLA from folding the transposed gradient into its bfloat16 matmul: CPU has no kernel for that.
    kernel = jax.lax.optimization_barrier(params["embedding"].T)
    return kernel, LOGITS, cfg.emb_dim**-0.5 if cfg.normalize_embedding_logits else 1.0


def empty_cache(cfg: Any, layout: Layout, batch: int, length: int) -> dict[str, Any]:
    """A cache for `length` tokens of `batch` rows: keys and values, or latents; none for layers that borrow."""

    def stacked(segment: Segment, spec: architecture.LayerSpec) -> Any:
        def zeros(dims: Axes, *shape: int) -> Array:
            shape = (segment.repeats, batch, length, *shape)
            return jnp.zeros(shape, cfg.dtype, out_sharding=layout.spec(("layers", *dims)))

        if spec.keys == "borrowed":
            return None
        if spec.latent:
            widths = [spec.latent.key_value_rank, spec.latent.rope_dim]
            widths += [cfg.indexer_head_dim] if spec.latent.indexer else []
            return mla.LatentCache(*(zeros(mla.NARROW, width) for width in widths))
        heads = attention.heads_in_use(layout, spec.kv_heads)
        return Cache(*(zeros(attention.KV_HEADS, heads, spec.head_dim) for _ in range(2)))

    return {
        segment.name: {str(i): stacked(segment, spec) for i, spec in enumerate(segment.pattern)}
        for segment in segments(cfg)
    }


def decode(
    cfg: Any, layout: Layout, params: Any, ids_BS: Int[Array, "B S"], slot: Int[Array, ""], cache: Any
) -> tuple[Float[Array, "B S D"], Any]:
    """Hidden states of `ids`, which stand at positions slot, slot+1, ...; returns (hidden [B, S, D], cache)."""
    batch, length = ids_BS.shape
    positions = slot + jnp.arange(length)
    total = jax.tree.leaves(cache)[0].shape[2]
    q_BS = jnp.broadcast_to(positions, ids_BS.shape)
    k_BT = jnp.broadcast_to(jnp.arange(total), (batch, total))
    x, own = _embed(cfg, layout, params, ids_BS, q_BS)
    q, k = (Places(place, place, jnp.ones_like(place)) for place in (q_BS, k_BT))
    context = _context(cfg, layout, q, k, None, slot)
    x, sides = _run(cfg, layout, params, x, own, context, caches=cache)
    cache = {name: {i: sides[f"decoder/{name}/{i}"].cache for i in of_segment} for name, of_segment in cache.items()}
    return _final(cfg, layout, params, x), cache
