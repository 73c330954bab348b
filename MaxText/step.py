"""One optimizer step: accumulate gradients, clip once on the global norm, update. And the evaluation step.

The batch is [A, B, S]: A microbatches. The loss is a sum over the step's real targets divided by their count, which is
known before the first microbatch; so loss and gradients do not depend on how the batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from MaxText import loss, optimizer
from MaxText.layout import Layout
from MaxText.state import TrainState

Batch = dict[str, Int[Array, "A B S"]]
BATCH_KEYS = ("inputs", "targets", "positions", "segments", "loss_mask")
Metrics = dict[str, Float[Array, ""]]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def gradients(cfg: Any, layout: Layout, params: Any, batch: Batch) -> tuple[Any, Metrics]:
    """(gradients of the objective in grad_dtype, {loss, lm_loss, z_loss, total_weights}) over all microbatches."""
    weight = batch["loss_mask"].astype(jnp.float32).sum()
    per_target = 1.0 / jnp.maximum(weight, 1.0)

    def objective(params: Any, microbatch: dict[str, Array]):
        sums = loss.sums(cfg, layout, params, microbatch)
        parts = {"lm_loss": sums.nll * per_target, "z_loss": cfg.z_loss_multiplier * sums.log_z_squared * per_target}
        return parts["lm_loss"] + parts["z_loss"], parts

    def one(microbatch: dict[str, Array]):
        (total, parts), grads = jax.value_and_grad(objective, has_aux=True)(params, microbatch)
        return {"loss": total, **parts}, jax.tree.map(lambda g: g.astype(cfg.grad_dtype), grads)

    head, *_ = (jax.tree.map(lambda x: x[0], batch),)
    result = one(head)
    if batch["inputs"].shape[0] > 1:
        rest = jax.tree.map(lambda x: x[1:], batch)
        result, _ = jax.lax.scan(lambda sofar, mb: (jax.tree.map(jnp.add, sofar, one(mb)), None), result, rest)
    metrics, grads = result
    return grads, {**metrics, "total_weights": weight}


def make_train_step(cfg: Any, layout: Layout, tx: optax.GradientTransformation) -> Step:
    """The train step. Run it under `jax.set_mesh`; donate the state."""
    rate_at = optimizer.schedule(cfg)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, metrics = gradients(cfg, layout, state.params, batch)
        norm = optax.global_norm(grads)
        grads = optimizer.clip_by_global_norm(grads, norm, cfg.gradient_clipping_threshold)
        direction, opt_state = tx.update(grads, state.opt_state, state.params)
        rate = rate_at(state.step)
        params = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), state.params, direction)
        metrics |= {"grad_norm": norm, "learning_rate": rate}
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


def make_eval_step(cfg: Any, layout: Layout) -> Callable[[Any, dict[str, Array]], Metrics]:
    """Sums of -log p over the real targets of a batch [B, S], and their number; the caller adds up and divides once."""

    def eval_step(params: Any, batch: dict[str, Array]) -> Metrics:
        sums = loss.sums(cfg, layout, params, batch)
        return {"nll": sums.nll, "weight": sums.weight}

    return eval_step
