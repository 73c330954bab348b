"""What the start says, on one screen: pure functions from values to text."""

from __future__ import annotations

from typing import Any

from MaxText import flops, optimizer
from MaxText.data import Train
from MaxText.hardware import Hardware
from MaxText.planner import Plan
from MaxText.session import Session


def size(count: float) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _model(cfg: Any, plan: Plan) -> str:
    latent = cfg.attention_type == "mla"
    heads = f"x {cfg.qk_nope_head_dim + cfg.qk_rope_head_dim} (latent)" if latent else f"x {cfg.head_dim}"
    shared = "" if latent else f" ({cfg.num_kv_heads} key/value)"
    return (
        f"{plan.parameters:,} parameters, {_active(cfg, plan)}; {cfg.num_decoder_layers} layers, width {cfg.emb_dim}, "
        f"{cfg.num_query_heads} heads {heads}{shared}, mlp {cfg.mlp_dim}{_experts(cfg)}, vocabulary {cfg.vocab_size}"
    )


def _active(cfg: Any, plan: Plan) -> str:
    """How many parameters a token passes; of a dense model all are said to be active, as everyone says."""
    return "all active" if cfg.num_experts == 1 else f"{flops.active_parameters(cfg, plan.tree):,} active"


def _experts(cfg: Any) -> str:
    if cfg.num_experts == 1:
        return ""
    shared = f" + {cfg.shared_experts} shared" if cfg.shared_experts else ""
    return f", {cfg.num_experts} experts of {cfg.moe_mlp_dim} ({cfg.num_experts_per_tok} a token{shared})"


def _mesh(plan: Plan, hardware: Hardware) -> str:
    simulated = " (simulated on this CPU: right, not faster)" if hardware.simulated else ""
    return (
        f"{plan.describe_mesh()}{simulated}; per device {size(plan.parameter_bytes)} parameters + "
        f"{size(plan.optimizer_bytes)} optimizer state"
    )


def _batch(cfg: Any, plan: Plan) -> str:
    parts = f" in {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
    return (
        f"{plan.global_batch_size} rows x {cfg.max_target_length} = {plan.tokens_per_step:,} tokens a step{parts}; "
        f"{cfg.steps:,} steps = {cfg.steps * plan.tokens_per_step:,} tokens"
    )


def _data(cfg: Any, train: Train, tokenizer_name: str) -> str:
    epochs = f", {cfg.steps * train.global_batch / train.rows:.2f} epochs" if train.rows else ""
    tokens = f", {train.tokens:,} tokens" if train.tokens else ""
    return f"{train.source}{tokens}{epochs}; tokenizer {tokenizer_name}"


def _rows(rows: list[tuple[str, str]]) -> str:
    """Two columns; the lines of a text of several stay in its column."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text.replace(chr(10), chr(10) + ' ' * (width + 2))}" for name, text in rows)


def plan(cfg: Any, hardware: Hardware, plan: Plan, dtype_reason: str) -> list[tuple[str, str]]:
    """What the planner decided, for the start screen."""
    return [
        ("model", _model(cfg, plan)),
        ("hardware", f"{hardware.devices} x {hardware.kind}"),
        ("mesh", _mesh(plan, hardware)),
        ("compute", f"{cfg.dtype}: {dtype_reason}; weights {cfg.weight_dtype}, remat {cfg.remat_policy}"),
        ("batch", _batch(cfg, plan)),
        *([("pipeline", plan.pipeline.describe())] if plan.pipeline else []),
        *(("note", note) for note in plan.notes),
    ]


def start(made: Session, done: int, resumed: str, notes: list[str]) -> str:
    """The start screen: FRESH, RESUMED after `done` steps from where `resumed` says, or a NEW run after as many of
    another; `notes` are lines about what is different or wrong."""
    cfg = made.cfg
    fresh = f"NEW, goes on after {done} steps of another run" if done else f"FRESH, seed {cfg.init_weights_seed}"
    old = f"RESUMED after {done} steps from {resumed}"
    schedule = f"{cfg.opt_type}, learning rate {cfg.learning_rate:g} ({cfg.lr_schedule_type})"
    rows = [
        ("run", f"{cfg.run_name} in {cfg.run_folder}"),
        ("start", "\n".join([old if resumed else fresh, *notes])),
        *plan(cfg, made.hardware, made.plan, made.dtype_reason),
        ("optimizer", f"{schedule}; {optimizer.describe_decay(cfg, made.plan.tree)}"),
        ("data", _data(cfg, made.train, made.tokenizer.name)),
        ("held out", made.evaluation.source if made.evaluation else "none"),
        ("logs", f"{cfg.run_folder}/: log.txt, metrics.jsonl, goodput.jsonl, config.yml"),
    ]
    return _rows(rows)


def complete(cfg: Any, done: int) -> str:
    """Said instead of a start where every step is done."""
    return (
        f"run {cfg.run_name} is complete: {done} steps in {cfg.run_folder}. "
        f"To continue: steps={2 * done}. To start another: run_name=NAME."
    )


def _checkpoint(cfg: Any, step: int) -> str:
    return f"{cfg.run_folder}/checkpoints/{step}"


def end(cfg: Any, done: int, saved: int | None) -> str:
    """Where the newest complete checkpoint is, and how to continue."""
    where = "no checkpoint was written" if saved is None else f"checkpoint of {saved} steps: {_checkpoint(cfg, saved)}"
    how = f"steps={2 * cfg.steps}" if done >= cfg.steps else "the same command"
    return f"{where}\nto continue: {how}"
