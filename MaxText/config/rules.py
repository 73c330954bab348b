"""Rules between keys, as far as they need no devices. One function per rule; its parameters are the keys that it reads.

A rule returns None, or a sentence with both numbers and what to type; `check` puts the keys, values and origins first.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from MaxText.config.origin import Origin
from MaxText.config.problem import Problem, show


class Rule(NamedTuple):
    id: str
    keys: tuple[str, ...]
    broken: Callable[..., str | None]
    notable: Callable[[object], bool] = lambda value: True

    @property
    def meaning(self) -> str:
        return inspect.getdoc(self.broken) or ""


RULES: list[Rule] = []


def rule(
    id: str, notable: Callable[[object], bool] = lambda value: True
) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
    """Registers a rule; its message shows the values that are `notable`."""

    def register(broken: Callable[..., str | None]) -> Callable[..., str | None]:
        RULES.append(Rule(id, tuple(inspect.signature(broken).parameters), broken, notable))
        return broken

    return register


def check(values: Mapping[str, object], origins: Mapping[str, Origin], skip: frozenset[str]) -> list[Problem]:
    """The broken rules. A rule that reads a key of `skip` (already wrong by itself) is not asked."""
    problems = []
    for one in RULES:
        if skip.isdisjoint(one.keys):
            text = one.broken(**{key: values[key] for key in one.keys})
            if text is not None:
                shown = (key for key in one.keys if one.notable(values[key]))
                subject = ", ".join(f"{key}={show(values[key])} ({origins[key]})" for key in shown)
                problems.append(Problem(one.id, subject, text))
    return problems


def divisors(number: int, at_most: int = 12) -> str:
    """The divisors of `number` in words."""
    found = [d for d in range(1, number + 1) if number % d == 0] if number <= 1 << 20 else [1]
    return ", ".join(map(str, found[:at_most])) + (", ..." if len(found) > at_most else "")


def _axes(kind: str) -> tuple[str, ...]:
    names = ("pipeline", "data", "fsdp", "fsdp_transpose", "expert", "context", "tensor")
    return tuple(f"{kind}_{name}_parallelism" for name in names)


# run


@rule("config.run-name")
def run_name_is_a_folder_name(run_name: str) -> str | None:
    """run_name is one legal folder name."""
    if not run_name:
        return None
    if run_name in (".", ".."):
        return "is no name for a folder; choose a word"
    bad = sorted({c for c in run_name if c in '/\\:*?"<>|' or not c.isprintable()})
    if bad:
        return f"must be one folder name, without {' '.join(map(repr, bad))}; where it lies is base_output_directory"
    if run_name != run_name.strip() or run_name.startswith(("-", "~")):
        return "must not begin with a space, - or ~, nor end with a space"
    length = len(run_name.encode())
    return f"is {length} bytes long; a folder name has at most 255" if length > 255 else None


@rule("config.output-directory")
def output_is_a_local_folder(base_output_directory: str) -> str | None:
    """base_output_directory is a path on a mounted file system."""
    if not base_output_directory.strip():
        return "must name a folder; write . for this one"
    return _path_fault(base_output_directory)


@rule("config.metrics-file")
def metrics_file_is_a_file(metrics_file: str) -> str | None:
    """metrics_file is the path of a file on a mounted file system."""
    if metrics_file.endswith(("/", "\\")):
        return "ends like a folder; give a file, such as metrics.jsonl"
    return _path_fault(metrics_file)


def _path_fault(path: str) -> str | None:
    if "://" in path:
        return f"{path.split('://')[0]}:// is not offered; give a path on a mounted file system"
    return None if path.isprintable() else "holds a character that no path should have"


@rule("config.steps")
def steps_or_schedule_is_given(steps: int, learning_rate_schedule_steps: int) -> str | None:
    """Of steps and learning_rate_schedule_steps one may be -1, which takes the other's value."""
    both = steps == -1 and learning_rate_schedule_steps == -1
    return "each takes its value from the other; give one a number, such as steps=600" if both else None


@rule("config.resume-without-checkpoints")
def resume_needs_checkpoints(start: str, enable_checkpointing: bool) -> str | None:
    """start=resume needs enable_checkpointing=true."""
    if start == "resume" and not enable_checkpointing:
        return "cannot resume what is never saved; set enable_checkpointing=true or start=auto"
    return None


@rule("config.cpu-devices")
def virtual_devices_are_cpu_devices(num_cpu_devices: int, hardware: str) -> str | None:
    """num_cpu_devices is for hardware=cpu or auto."""
    if num_cpu_devices and hardware not in ("auto", "cpu"):
        return "virtual CPU devices need hardware=cpu; otherwise set num_cpu_devices=0"
    return None


# architecture


@rule("config.scale")
def scale_is_a_power_of_two(global_parameter_scale: int) -> str | None:
    """global_parameter_scale is a power of two."""
    below = 1 << (global_parameter_scale.bit_length() - 1)
    if global_parameter_scale != below:
        return f"must be a power of two; the nearest are {below} and {2 * below}"
    return None


@rule("config.heads")
def kv_heads_divide_query_heads(base_num_query_heads: int, base_num_kv_heads: int) -> str | None:
    """base_num_kv_heads divides base_num_query_heads: each key/value head serves equally many queries."""
    if base_num_query_heads % base_num_kv_heads:
        legal = divisors(base_num_query_heads)
        return f"{base_num_kv_heads} kv heads do not divide {base_num_query_heads} query heads. Legal: {legal}"
    return None


@rule("config.head-dim")
def head_dim_is_even(head_dim: int) -> str | None:
    """head_dim is even, since rope rotates pairs."""
    return f"must be even, since rope rotates pairs; try {head_dim + 1}" if head_dim % 2 else None


@rule("config.rope")
def rope_timescales_are_ordered(rope_min_timescale: int, rope_max_timescale: int) -> str | None:
    """rope_min_timescale is below rope_max_timescale."""
    if rope_min_timescale >= rope_max_timescale:
        return f"{rope_min_timescale} is not below {rope_max_timescale}; the usual are 1 and 10000 or more"
    return None


@rule("config.vocab-tiling")
def tiles_divide_vocabulary(num_vocab_tiling: int, vocab_size: int) -> str | None:
    """num_vocab_tiling divides vocab_size."""
    if vocab_size % num_vocab_tiling:
        return f"{num_vocab_tiling} chunks do not divide {vocab_size} ids. Legal: {divisors(vocab_size)}"
    return None


# mesh


def _mesh_rule(id: str, *keys: str) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
    def register(broken: Callable[..., str | None]) -> Callable[..., str | None]:
        RULES.append(Rule(id, keys, broken, notable=lambda value: value != 1))
        return broken

    return register


@_mesh_rule("config.ici-fill", *_axes("ici"))
@_mesh_rule("config.dcn-fill", *_axes("dcn"))
def one_degree_fills(**degrees: int) -> str | None:
    """At most one of the ici degrees, and of the dcn degrees, is -1."""
    fills = [key for key, degree in degrees.items() if degree == -1]
    return "only one of them can take the rest of the devices; give the others a number" if len(fills) > 1 else None


@_mesh_rule("config.slices", "num_slices", *_axes("dcn"))
def degrees_make_the_slices(num_slices: int, **degrees: int) -> str | None:
    """The dcn degrees multiply to num_slices; one that is -1 takes the rest."""
    product = math.prod(degree for degree in degrees.values() if degree != -1)
    if num_slices == -1 or product == num_slices:
        return None
    if -1 not in degrees.values():
        return f"the degrees multiply to {product}, not {num_slices} slices; set one to -1, or num_slices={product}"
    if num_slices % product:
        return f"the degrees multiply to {product}, which does not divide {num_slices} slices"
    return None


# batch and data


@rule("config.accumulation")
def microbatches_divide_global_batch(global_batch_size: int, gradient_accumulation_steps: int) -> str | None:
    """gradient_accumulation_steps divides global_batch_size."""
    rest = global_batch_size % gradient_accumulation_steps
    if not rest:
        return None
    below = global_batch_size - rest
    nearest = f"{below} and " if below else ""
    return (
        f"{global_batch_size} rows cannot be cut into {gradient_accumulation_steps} equal microbatches; "
        f"the nearest global_batch_size are {nearest}{below + gradient_accumulation_steps}"
    )


# memory

_PLACES = (
    "query_proj", "key_proj", "value_proj", "query_wa_proj", "kv_wa_proj", "kv_proj", "context", "out_proj",
    "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo",
)  # fmt: skip


def _places_need_custom(**values: str) -> str | None:
    """Places of intermediates (query_proj=device, ...) need remat_policy=custom; a layer's input is kept somewhere."""
    policy, layer_input = values.pop("remat_policy"), values.pop("decoder_layer_input")
    chosen = [name for name, place in values.items() if place != "remat"]
    chosen += ["decoder_layer_input"] if layer_input != "device" else []
    if chosen and policy != "custom":
        return f"{', '.join(chosen)} would have no effect; add remat_policy=custom"
    if layer_input == "remat":
        return "the input of a layer must be kept; set decoder_layer_input=device or offload"
    return None


RULES.append(
    Rule(
        "config.remat-places",
        ("remat_policy", "decoder_layer_input", *_PLACES),
        _places_need_custom,
        notable=lambda value: value in ("custom", "offload"),
    )
)


# checkpoint


@rule("config.keep-period")
def kept_steps_are_saved(checkpoint_keep_period: int, checkpoint_period: int) -> str | None:
    """checkpoint_keep_period is a multiple of checkpoint_period."""
    rest = checkpoint_keep_period % checkpoint_period
    if not rest:
        return None
    return (
        f"only multiples of {checkpoint_period} are saved; the nearest is "
        f"{max(checkpoint_period, checkpoint_keep_period - rest)}"
    )


@rule("config.local-checkpoints")
def local_checkpoints_are_whole(
    enable_emergency_checkpoint: bool,
    local_checkpoint_directory: str,
    local_checkpoint_period: int,
    checkpoint_period: int,
    enable_checkpointing: bool,
) -> str | None:
    """enable_emergency_checkpoint needs local_checkpoint_directory, a local_checkpoint_period below checkpoint_period,
    and enable_checkpointing; without it the first two do nothing and must be left out."""
    given = [bool(local_checkpoint_directory), local_checkpoint_period > 0]
    if not enable_emergency_checkpoint:
        return "does nothing; set enable_emergency_checkpoint=true" if any(given) else None
    if not all(given):
        return "set a folder on each node, such as /dev/shm/checkpoints, and the steps between saves there, such as 10"
    if not enable_checkpointing:
        return "stands beside durable checkpoints; set enable_checkpointing=true"
    if local_checkpoint_period >= checkpoint_period:
        return f"local saves are the frequent ones; set local_checkpoint_period below {checkpoint_period}"
    return _path_fault(local_checkpoint_directory)


@rule("config.two-beginnings")
def one_place_to_begin_from(load_parameters_path: str, load_full_state_path: str) -> str | None:
    """At most one of load_parameters_path and load_full_state_path is set."""
    both = load_parameters_path and load_full_state_path
    return "a state has parameters already; leave load_parameters_path out" if both else None


# optimizer, profiler


@rule("config.schedule-fractions")
def warmup_and_decay_fit(
    lr_schedule_type: str, warmup_steps_fraction: float, wsd_decay_steps_fraction: float
) -> str | None:
    """With lr_schedule_type=wsd, warmup and decay together are at most the whole schedule."""
    total = warmup_steps_fraction + wsd_decay_steps_fraction
    if lr_schedule_type == "wsd" and total > 1 + 1e-9:  # 0.7 + 0.3 may round above 1
        return f"warmup and decay together take {total:g} of the schedule; make them at most 1"
    return None


@rule("config.profiler-window")
def trace_lies_within_the_run(
    profiler: str, skip_first_n_steps_for_profiler: int, profiler_steps: int, steps: int
) -> str | None:
    """With a profiler, skip_first_n_steps_for_profiler + profiler_steps is at most steps."""
    last = skip_first_n_steps_for_profiler + profiler_steps
    if profiler and steps != -1 and last > steps:
        return f"the trace would end with step {last} of {steps}; shorten it with profiler_steps, or set steps={last}"
    return None
