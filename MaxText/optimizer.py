"""Learning-rate schedule and optimizer.

The learning rate is a function of the optimizer step in the state and of the schedule in the config; weight decay
follows each parameter's role. The optax chain ends in a direction; `step` multiplies it by the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from MaxText import blueprint
from MaxText.layout import Layout

DECAYED_KINDS = ("kernel", "embedding")


def schedule(cfg: Any) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    """Step -> learning rate.

    N = learning_rate_schedule_steps, w = int(N * warmup_steps_fraction), p = learning_rate, f =
    learning_rate_final_fraction * p. step < w: p * step / w (step 0 trains with 0). Then cosine from p to exactly f at
    step N - 1; or wsd: p, and over the last d = int(N * wsd_decay_steps_fraction) steps down to exactly f at step N -
    1, linearly or by cosine; or constant: p. Steps from N on: 0."""
    total = cfg.learning_rate_schedule_steps
    warmup = int(total * cfg.warmup_steps_fraction)
    peak, final = cfg.learning_rate, cfg.learning_rate * cfg.learning_rate_final_fraction
    kind = cfg.lr_schedule_type
    decay_steps = {"cosine": total - warmup, "wsd": int(total * cfg.wsd_decay_steps_fraction), "constant": 0}[kind]
    linear = kind == "wsd" and cfg.wsd_decay_style == "linear"

    def at(step: Int[Array, ""]) -> Float[Array, ""]:
        s = step.astype(jnp.float32)
        progress = jnp.clip((s - (total - decay_steps)) / max(decay_steps - 1, 1), 0.0, 1.0)
        share_of_peak = 1.0 - progress if linear else 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        after_warmup = peak * share_of_peak + final * (1.0 - share_of_peak) if decay_steps else jnp.full_like(s, peak)
        rate = jnp.where(s < warmup, peak * s / max(warmup, 1), after_warmup)
        return jnp.where(s >= total, 0.0, rate)

    return at


def decay_mask(tree: blueprint.Blueprint) -> dict[str, Any]:
    """True where weight decay applies: kernels and embeddings, never norms or biases."""
    return blueprint.map_params(lambda _, p: p.kind in DECAYED_KINDS, tree)


def describe_decay(cfg: Any, tree: blueprint.Blueprint) -> str:
    """For the start screen: which parameters decay."""
    if cfg.opt_type == "sgd" or not cfg.adam_weight_decay:
        return "no weight decay"
    decayed = sum(p.size for _, p in blueprint.leaves(tree) if p.kind in DECAYED_KINDS)
    return (
        f"weight decay {cfg.adam_weight_decay} on {decayed:,} of {blueprint.count(tree):,} parameters "
        "(kernels and embeddings)"
    )


def _adam(cfg: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(cfg.adam_b1, cfg.adam_b2, cfg.adam_eps, cfg.adam_eps_root, mu_dtype=cfg.mu_dtype)


def make(cfg: Any, tree: blueprint.Blueprint, layout: Layout) -> optax.GradientTransformation:
    """Clipped gradients -> direction to subtract, times the learning rate. State in mu_dtype (first moment) and
    grad_dtype; with shard_optimizer_over_data split over the data axis as well."""
    tx = _chain(cfg, tree)
    return _spread_over_data(tx, tree, layout) if cfg.shard_optimizer_over_data else tx


def _spread_over_data(
    tx: optax.GradientTransformation, tree: blueprint.Blueprint, layout: Layout
) -> optax.GradientTransformation:
    """ZeRO-1 (Rajbhandari et al., 2020, arXiv:1910.02054): each data replica updates its part. What comes in is cut to
    that part, and the direction is gathered again."""
    parts = blueprint.map_params(lambda _, p: layout.spread(p.axes, p.shape, "data"), tree)
    wholes = blueprint.map_params(lambda _, p: layout.spec(p.axes), tree)

    def cut(values: Any) -> Any:
        return jax.tree.map(jax.reshard, values, parts)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        direction, state = tx.update(cut(grads), state, None if params is None else cut(params))
        return jax.tree.map(jax.reshard, direction, wholes), state

    return optax.GradientTransformation(lambda params: tx.init(cut(params)), update)


def _chain(cfg: Any, tree: blueprint.Blueprint) -> optax.GradientTransformation:
    decay = (
        optax.add_decayed_weights(cfg.adam_weight_decay, decay_mask(tree))
        if cfg.adam_weight_decay
        else optax.identity()
    )
    match cfg.opt_type:
        case "sgd":
            return optax.identity()
        case "adamw":
            return optax.chain(_adam(cfg), decay)
    raise AssertionError(cfg.opt_type)


def clip_by_global_norm(grads: Any, norm: Float[Array, ""], threshold: float) -> Any:
    """Gradients scaled so that their global norm is at most `threshold` (0: off). `norm` is the norm of `grads`."""
    if not threshold:
        return grads
    factor = jnp.where(norm > threshold, threshold / norm, 1.0)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
