"""One optimizer step: accumulate gradients, clip once on the global norm, update. And the evaluation step.

The batch is [A, B, S]: A microbatches. The loss is a sum over the step's real targets divided by their count, which is
known before the first microbatch; so loss and gradients do not depend on how the batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from MaxText import balance, decoder, loss, optimizer
from MaxText.layers import dropout
from MaxText.layout import Layout
from MaxText.state import TrainState

Batch = dict[str, Int[Array, "A B S"]]
BATCH_KEYS = ("inputs", "targets", "positions", "segments", "loss_mask")
Metrics = dict[str, Float[Array, ""]]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Totals(NamedTuple):
    """What the losses of a step are divided by, known before its first microbatch: real targets, those of each further
    prediction, real tokens; and for a global balance loss how many tokens chose each expert."""

    targets: Float[Array, ""]
    further: tuple[Float[Array, ""], ...]
    tokens: Float[Array, ""]
    loads: balance.Loads | None


def _totals(cfg: Any, layout: Layout, params: Any, batch: Batch) -> Totals:
    def count(mask: Array) -> Array:
        return jnp.maximum(mask.astype(jnp.float32).sum(), 1.0)

    further = tuple(count(loss.further_mask(cfg, layout, batch, by)) for by in range(1, cfg.mtp_num_layers + 1))
    loads = None
    if balance.needs_whole_step(cfg) and batch["inputs"].shape[0] > 1:
        loads = _summed(lambda mb: balance.loads(decoder.run(cfg, layout, params, mb).routing), batch)
    return Totals(count(batch["loss_mask"]), further, count(batch["segments"] != 0), loads)


def _summed(function: Callable[[dict[str, Array]], Any], batch: Batch) -> Any:
    """The sum of function(microbatch) over all microbatches."""
    result = function(jax.tree.map(lambda x: x[0], batch))
    if batch["inputs"].shape[0] > 1:
        rest = jax.tree.map(lambda x: x[1:], batch)
        result, _ = jax.lax.scan(lambda sofar, mb: (jax.tree.map(jnp.add, sofar, function(mb)), None), result, rest)
    return result


def _parts(cfg: Any, sums: loss.LossSums, totals: Totals) -> Metrics:
    """One microbatch's part of each term of the step's objective."""
    parts = {
        "lm_loss": sums.nll / totals.targets,
        "z_loss": cfg.z_loss_multiplier * sums.log_z_squared / totals.targets,
    }
    if sums.further_nll:
        further = sum(nll / count for nll, count in zip(sums.further_nll, totals.further, strict=True))
        parts["mtp_loss"] = cfg.mtp_loss_scaling_factor * further / len(sums.further_nll)
    if cfg.use_indexer and cfg.indexer_loss_scaling_factor:
        parts["indexer_loss"] = cfg.indexer_loss_scaling_factor * sums.index_loss / totals.tokens
    loads = balance.loads(sums.routing) if totals.loads is None else totals.loads
    return parts | balance.losses(cfg, sums.routing, loads, totals.tokens)


def gradients(cfg: Any, layout: Layout, params: Any, batch: Batch) -> tuple[Any, Metrics]:
    """(gradients of the objective in grad_dtype, {loss, its terms, total_weights, ...}) over all microbatches."""
    grads, metrics, _ = gradients_and_loads(cfg, layout, params, batch)
    return grads, metrics


def gradients_and_loads(cfg: Any, layout: Layout, params: Any, batch: Batch) -> tuple[Any, Metrics, balance.Loads]:
    """The same, and how many tokens chose each expert, by layer."""
    totals = _totals(cfg, layout, params, batch)

    def objective(params: Any, microbatch: dict[str, Array]):
        sums = loss.sums(cfg, layout, params, microbatch)
        parts = _parts(cfg, sums, totals)
        dropped = sum(found.dropped.sum() for found in sums.routing.values())
        return sum(parts.values()), (parts, balance.loads(sums.routing), dropped)

    def one(microbatch: dict[str, Array]):
        (total, (parts, loads, dropped)), grads = jax.value_and_grad(objective, has_aux=True)(params, microbatch)
        grads = jax.tree.map(lambda g: g.astype(cfg.grad_dtype), grads)
        return {"loss": total, **parts}, grads, loads, dropped

    metrics, grads, loads, dropped = _summed(one, batch)
    weight = batch["loss_mask"].astype(jnp.float32).sum()
    return grads, {**metrics, "total_weights": weight, **balance.summary(loads, dropped)}, loads


def make_train_step(cfg: Any, layout: Layout, tx: optax.GradientTransformation) -> Step:
    """The train step. Run it under `jax.set_mesh`; donate the state."""
    rate_at = optimizer.schedule(cfg)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        batch = dropout.with_keys(cfg, layout, batch, state.step)
        grads, metrics, loads = gradients_and_loads(cfg, layout, state.params, batch)
        norm = optax.tree.norm(grads)
        grads = optimizer.clip_by_global_norm(grads, norm, cfg.gradient_clipping_threshold)
        direction, opt_state = tx.update(grads, state.opt_state, state.params)
        rate = rate_at(state.step)
        params = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), state.params, direction)
        params = balance.moved(cfg, params, loads)
        metrics |= {"grad_norm": norm, "learning_rate": rate}
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


def make_eval_step(cfg: Any, layout: Layout) -> Callable[[Any, dict[str, Array]], Metrics]:
    """Sums of -log p over the real targets of a batch [B, S], and their number; the caller adds up and divides once."""

    def eval_step(params: Any, batch: dict[str, Array]) -> Metrics:
        sums = loss.sums(cfg, layout, params, batch)
        return {"nll": sums.nll, "weight": sums.weight}

    return eval_step
