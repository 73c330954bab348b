"""The pipeline: its schedule against a simulation, its program against loops, and whole models against one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from MaxText import decoder, generate, loss, pipeline, planner, step
from MaxText.architecture import Segment
from MaxText.blueprint import ONES, Param
from MaxText.checkpoint import Store
from MaxText.errors import PlanError
from MaxText.layout import STAGE_LAYERS
from tests import toy as world
from tests.helpers import Toy, assert_close, cpu, toy, toy_batch, toy_config

BATCH = toy_batch()
LAYERS = {"base_num_decoder_layers": 4}
ONCE, TWICE = {"num_pipeline_repeats": 1}, {"num_pipeline_repeats": 2}


def schedule(stages: int, repeats: int, microbatches: int, depth: int = 1, outside: int = 0) -> pipeline.Schedule:
    """With `outside` layers that the pipeline leaves out; below zero, it has so many empty ones."""
    segment = Segment("layers", stages * repeats * depth + outside, ())
    return pipeline.Schedule(segment, stages, repeats, microbatches, depth, max(-outside, 0))


# --- the schedule


@pytest.mark.parametrize(
    ("stages", "repeats", "microbatches"), [(2, 1, 2), (2, 3, 2), (4, 1, 8), (4, 2, 4), (3, 5, 6), (8, 2, 8)]
)
def test_every_item_reaches_every_stage_in_order_and_the_bubble_is_the_rest(stages, repeats, microbatches):
    """A simulation by the rule alone: stage s works on item t - s. An item's layers come one after another, and stage 0
    has it back before it is due again."""
    made = schedule(stages, repeats, microbatches)
    seen: dict[int, list[tuple[int, int]]] = {m: [] for m in range(microbatches)}
    work = 0
    for t in range(made.iterations):
        for stage in range(stages):
            item = t - stage
            if 0 <= item < microbatches * repeats:
                seen[item % microbatches].append((t, item // microbatches * stages + stage))
                work += 1
    for turns in seen.values():
        times, layers = zip(*turns, strict=True)
        assert layers == tuple(range(stages * repeats)) and list(times) == sorted(set(times))
    assert made.bubble == pytest.approx(1 - work / (stages * made.iterations))
    assert made.bubble == (stages - 1) / (microbatches * repeats + stages - 1)


def dealt(stages: int, **overrides) -> tuple[int, int, int, bool]:
    made = pipeline.make(toy_config(**{"base_num_decoder_layers": 12} | overrides), stages)
    assert made is not None
    return made.repeats, made.depth, made.pipelined, made.owned


@pytest.mark.parametrize(
    ("stages", "keys", "expected"),
    [
        (2, {}, (6, 1, 12, False)),
        (2, ONCE, (1, 6, 12, True)),
        (3, TWICE, (2, 2, 12, False)),
        (2, {"num_layers_per_pipeline_stage": 3}, (2, 3, 12, False)),
        (4, {"pipeline_parallel_layers": 8}, (2, 1, 8, False)),
        (4, {"pipeline_parallel_layers": 8, **ONCE}, (1, 2, 8, False)),
        (2, {"layer_pattern": ["local_sliding"] * 2 + ["global"], "sliding_window_size": 4}, (2, 1, 4, False)),
        (2, {"first_num_dense_layers": 2, "num_experts": 4}, (5, 1, 10, False)),
        (2, {"dcn_pipeline_parallelism": 2}, (1, 6, 12, True)),
        (5, {"pipeline_pad_layers": True}, (3, 1, 12, False)),
        (5, {"pipeline_pad_layers": True} | ONCE, (1, 3, 12, False)),
        (5, {"pipeline_pad_layers": True, "num_layers_per_pipeline_stage": 2} | TWICE, (2, 2, 12, False)),
        (4, {"pipeline_pad_layers": True} | ONCE, (1, 3, 12, True)),
    ],
)
def test_how_layers_are_dealt(stages, keys, expected):
    assert dealt(stages, **keys) == expected


def test_one_stage_is_no_pipeline():
    assert pipeline.make(toy_config(), 1) is None


# --- the program, on a stage function that a pencil can follow


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ({"pipeline": 2, "fsdp": 2}, (1, 2, 2, 0)),
        ({"pipeline": 2, "fsdp": 2, "context": 2}, (3, 4, 1, 1)),
        ({"pipeline": 4, "tensor": 2}, (2, 4, 2, 0)),
        ({"pipeline": 2, "fsdp": 2}, (2, 4, 2, -3)),
    ],
    ids=["owned", "three-rounds-and-a-rest", "four-stages", "three-empty"],
)
def test_the_program_is_a_loop_over_layers(mesh, how):
    """Layers x -> w x + c do not commute, so their order shows; gradients and sums over microbatches show what an idle
    stage would add. Each layer adds a vector of its own, and the ids of its microbatch."""
    repeats, microbatches, depth, outside = how
    made = schedule(mesh["pipeline"], repeats, microbatches, depth, outside)
    stage = functools.partial(_stage, made)
    devices, _ = world.mesh(**mesh)
    layout = planner.make_layout(dict(devices.shape), stages_own=made.owned)
    stored, passing = made.segment.repeats, made.pipelined
    tree = {
        "w": Param((stored, 8, 6), (STAGE_LAYERS, "embed", "heads"), ONES),
        "c": Param((stored,), (STAGE_LAYERS,), ONES),
    }
    rng = np.random.default_rng(0)
    host = {name: 1 + 0.3 * rng.standard_normal(p.shape, np.float32) for name, p in tree.items()}
    x, ids = rng.standard_normal((8, 4, 8), np.float32), rng.integers(0, 5, (8, 4)).astype(np.int32)
    own = rng.standard_normal((passing, 8, 4, 3), np.float32)

    wanted, want_grads = jax.value_and_grad(_plainly, argnums=(0, 1, 2), has_aux=True)(host, x, own, ids)

    def run(params, x, own, rows):
        y, sums = pipeline.run(layout, made, tree, stage, params, x, rows, own, jax.checkpoint)
        return _objective(y, sums), sums

    dims = {
        "x": ("activation_batch", "activation_length", None),
        "own": (None, "activation_batch", "activation_length"),
    }
    with jax.set_mesh(devices):
        place = lambda value, dims: jax.device_put(value, NamedSharding(devices, layout.spec(dims)))  # noqa: E731
        params = {name: place(host[name], p.axes) for name, p in tree.items()}
        arguments = params, place(x, dims["x"]), place(own, (*dims["own"], None)), {"ids": place(ids, dims["x"][:2])}
        found, grads = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))(*arguments)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), grads, want_grads)
    assert grads[0]["w"].sharding.spec == layout.spec(tree["w"].axes)


def _objective(y, sums):
    return (y**2).mean() + jnp.sin(sums / 100).sum()


def _stage(made, inner, params, x, rows, own, numbers):
    """Layers of one stage; each goes through a wall, and leaves the sum of what came in."""
    stream = inner.spec(("activation_batch", "activation_length", None))

    def layer(x, slices):
        params, own, counts = slices
        factor = inner.gather(params["w"], ("embed", "heads")).mean(axis=1)
        scaled = inner.shard_map(lambda x, w: x * w[None, None], in_specs=(stream, PartitionSpec()), out_specs=stream)
        shift = params["c"] + rows["ids"][..., None] + own.sum(axis=-1, keepdims=True)
        after = scaled(x, jax.reshard(factor, PartitionSpec(None))) + shift
        return after if counts is None else jnp.where(counts, after, x), x.sum()

    real = numbers < made.pipelined if made.padding else None
    return jax.lax.scan(layer, x, (params, own, real))


def _plainly(params, x, own, ids):
    sums = []
    for w, c, vector in zip(params["w"], params["c"], own, strict=False):
        sums.append(x.sum())
        x = x * w.mean(axis=1)[None, None] + c + ids[..., None] + vector.sum(axis=-1, keepdims=True)
    return _objective(x, jnp.stack(sums)), jnp.stack(sums)


# --- models

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16, "shared_experts": 1}
EXPERTS |= {"load_balance_loss_weight": 0.1, "router_z_loss_weight": 0.01}
LATENT = {"decoder_block": "deepseek", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 4, "v_head_dim": 8, "rope_type": "default"}
GEMMA = {"layer_pattern": ["local_sliding", "global"], "sliding_window_size": 5, "base_num_decoder_layers": 8}
DROPLESS = EXPERTS | {"routed_score_func": "sigmoid", "n_routing_groups": 2, "topk_routing_group": 1}
CAPACITY = EXPERTS | {"capacity_factor": 1.0, "load_balance_loss_type": "sequence"}
DEEPSEEK = EXPERTS | {"base_num_decoder_layers": 7, "first_num_dense_layers": 2}
INDEXED = LATENT | {"use_indexer": True, "indexer_topk": 8, "indexer_n_heads": 2, "indexer_head_dim": 8}
INDEXED |= {"indexer_loss_scaling_factor": 0.1}
TIED = {"logits_via_embedding": True, "mtp_num_layers": 1, "num_vocab_tiling": 2}
FOUR = {"num_pipeline_microbatches": 4}

CASES = {
    "dense": ({"pipeline": 2, "fsdp": 2, "tensor": 2}, {"remat_policy": "full"}, TWICE),
    "capacity": ({"pipeline": 2, "expert": 2}, CAPACITY, ONCE | FOUR),
    "padded": ({"pipeline": 2, "fsdp": 2}, {"base_num_decoder_layers": 3}, {"pipeline_pad_layers": True} | ONCE),
}
SLOW = {
    "dense-owned": ({"pipeline": 2, "fsdp": 2, "data": 2}, {"remat_policy": "minimal"}, ONCE),
    "dense-unrolled": ({"pipeline": 2, "fsdp": 2}, {"scan_layers": False}, ONCE),
    "dense-offloaded": ({"pipeline": 2}, {"remat_policy": "qkv_proj_offloaded"}, TWICE),
    "four-stages": ({"pipeline": 4, "fsdp": 2}, {"base_num_decoder_layers": 8, "remat_policy": "minimal"}, TWICE),
    "gemma": ({"pipeline": 2, "tensor": 2}, GEMMA | {"remat_policy": "full", "attention_sink": True}, TWICE),
    "gemma-owned": ({"pipeline": 2, "fsdp": 2}, GEMMA, ONCE),
    "dropless": ({"pipeline": 2, "fsdp": 2}, DROPLESS | {"remat_policy": "full"}, TWICE),
    "dropless-expert": ({"pipeline": 2, "expert": 2, "data": 2}, DROPLESS, ONCE),
    "capacity-accumulated": ({"pipeline": 2, "fsdp": 2}, CAPACITY | {"gradient_accumulation_steps": 2}, ONCE),
    "capacity-twice": ({"pipeline": 2, "data": 2}, CAPACITY | {"remat_policy": "minimal"}, TWICE | FOUR),
    "tied-mtp": ({"pipeline": 2, "tensor": 2}, TIED, TWICE),
    "tied-mtp-accumulated": ({"pipeline": 2, "fsdp": 2}, TIED | {"gradient_accumulation_steps": 2}, ONCE),
    "mla": ({"pipeline": 2, "tensor": 2}, LATENT | {"remat_policy": "full"}, TWICE),
    "mla-indexed": ({"pipeline": 2, "fsdp": 2}, INDEXED, ONCE),
    "deepseek-rest": ({"pipeline": 2, "fsdp": 2}, DEEPSEEK, {"pipeline_parallel_layers": 4}),
    "deepseek-padded": ({"pipeline": 2, "fsdp": 2}, DEEPSEEK, {"pipeline_pad_layers": True} | TWICE),
    "own-vectors-padded": (
        {"pipeline": 2, "fsdp": 2},
        {"hidden_size_per_layer_input": 8, "base_num_decoder_layers": 3},
        {"pipeline_pad_layers": True},
    ),
    "own-vectors": ({"pipeline": 2, "fsdp": 2}, {"hidden_size_per_layer_input": 8}, TWICE),
    "context": ({"pipeline": 2, "context": 2}, {"remat_policy": "full"}, TWICE),
    "context-ring": ({"pipeline": 2, "context": 2}, {"context_parallel_strategy": "ring"}, ONCE),
    "context-windows": ({"pipeline": 2, "context": 2}, GEMMA, ONCE),
    "zero-1": ({"pipeline": 2, "data": 2}, {"shard_optimizer_over_data": True}, ONCE),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_loss_and_gradients_are_those_of_one_device(case):
    """Routing statistics are among the metrics: an idle stage must not add to them."""
    mesh, model, how = (CASES | SLOW)[case]
    model = LAYERS | model
    found, metrics = toy(mesh, **model, **how).gradients(BATCH)
    wanted, want_metrics = toy(**model).gradients(BATCH)
    still = {path for path, grad in wanted.items() if path.endswith("correction_bias")}
    assert_close(*({p: g for p, g in grads.items() if p not in still} for grads in (found, wanted)))
    assert metrics == pytest.approx(want_metrics, rel=1e-5)


def test_more_repeats_are_another_cut_of_the_same_computation():
    """The comparison can fail: with the layers dealt in another order the result is another one."""
    made = toy({"pipeline": 2, "fsdp": 2, "tensor": 2}, **LAYERS, remat_policy="full", **TWICE)
    right, _ = made.gradients(BATCH)
    swapped = {**made.params, "decoder": jax.tree.map(lambda p: p[jnp.array([0, 2, 1, 3])], made.params["decoder"])}
    wrong = made.run(lambda p, b: step.gradients(made.cfg, made.layout, p, b), swapped, made.put(BATCH))[0]
    with pytest.raises(AssertionError):
        assert_close({"embedding": np.asarray(wrong["embedding"])}, {"embedding": right["embedding"]})


@pytest.mark.parametrize("how", [ONCE, TWICE], ids=["owned", "exchanged"])
def test_bytes_and_places_of_the_parameters(how):
    """A stage stores its own layers, or a piece of each; planned bytes are those of the shards. The head and embedding
    are split over the stages too."""
    made = toy({"pipeline": 2, "fsdp": 2}, **LAYERS, **how)
    leaves = jax.tree.leaves(made.state())
    for device in made.mesh.devices.flat:
        pieces = [s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device]
        assert sum(pieces) == made.plan.state_bytes
    query = made.params["decoder"]["layers"]["0"]["attention"]["query"]
    assert query.shape == (4, 32, 4, 8)  # in the order of layers on any mesh
    assert query.addressable_shards[0].data.shape == ((2, 16, 4, 8) if how == ONCE else (4, 8, 4, 8))
    assert made.params["embedding"].addressable_shards[0].data.shape == (96, 8)


def test_a_checkpoint_fits_any_pipeline_and_none(tmp_path):
    """The parameters are the same noise on every mesh; so what comes back must be what that mesh starts from."""
    worlds = [({"pipeline": 2, "fsdp": 2}, TWICE), ({"pipeline": 4}, ONCE), ({}, {})]
    first, *others = (toy(mesh, **LAYERS, **how) for mesh, how in worlds)
    with Store(tmp_path, asynchronous=False) as store:
        store.save(1, first.params, {})
        for made in others:
            types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), made.params)
            found = store.restore(1, types)
            for leaf, want in zip(jax.tree.leaves(found), jax.tree.leaves(made.params), strict=True):
                np.testing.assert_array_equal(leaf, want)
                assert leaf.sharding == want.sharding


@pytest.mark.parametrize("how", [ONCE, TWICE], ids=["owned", "exchanged"])
def test_text_is_generated_as_on_one_device(how):
    prompt, length = np.tile(np.arange(12, dtype=np.int32), (2, 1)), np.int32(5)

    def sample(made: Toy):
        sampler = generate.make_sampler(made.cfg, made.layout.unsplit("activation_batch"), 12)
        whole = NamedSharding(made.mesh, PartitionSpec())
        arguments = prompt, length, np.zeros(2, np.float32), jax.random.key(0)
        with jax.set_mesh(made.mesh):
            return np.asarray(sampler(made.params, *(jax.device_put(x, whole) for x in arguments)))

    found = sample(toy({"pipeline": 2, "fsdp": 2}, **LAYERS, **how))
    np.testing.assert_array_equal(found, sample(toy(**LAYERS)))


# --- refusals and words


def refused(devices: int, words: tuple[object, ...], **overrides):
    sizes = {"ici_fsdp_parallelism": -1, "global_batch_size": 0, "per_device_batch_size": 2.0}
    cfg = toy_config(**(LAYERS | sizes | overrides))
    with pytest.raises(PlanError) as caught:
        planner.make(cfg, decoder.declare(cfg), cpu(devices))
    assert caught.value.exit_code == 3
    assert all(str(word) in str(caught.value) for word in words), str(caught.value)


SIX = {"base_num_decoder_layers": 6}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"ici_pipeline_parallelism": 8}, ("4 layers", "8 pipeline stages", "none", "1, 2, 4")),
        (
            {"ici_pipeline_parallelism": 4} | SIX,
            ("6 layers", "4 pipeline stages", "here (the rest", ": 4.", "1, 2, 3, 6"),
        ),
        ({"ici_pipeline_parallelism": 2, "pipeline_parallel_layers": 3}, ("=3", "2 pipeline stages", "2, 4")),
        ({"ici_pipeline_parallelism": 2, "pipeline_parallel_layers": 6}, ("=6", "2, 4")),
        ({"ici_pipeline_parallelism": 8} | GEMMA, ("8 layers in repeats of 2", "1, 2, 4")),
        (
            {"ici_pipeline_parallelism": 2, "num_pipeline_repeats": 3},
            ("num_pipeline_repeats=3", "2 layers", "2 x 1, 1 x 2"),
        ),
        (
            {"ici_pipeline_parallelism": 2, "num_layers_per_pipeline_stage": 2, "num_pipeline_repeats": 2},
            ("num_layers_per_pipeline_stage=2 x num_pipeline_repeats=2", "2 x 1, 1 x 2"),
        ),
        (
            {"ici_pipeline_parallelism": 2, "pipeline_parallel_layers": 3, "pipeline_pad_layers": True} | GEMMA,
            ("=3", "repeats of 2", "2 pipeline stages"),
        ),
        ({"ici_pipeline_parallelism": 4, "num_pipeline_microbatches": 2}, ("=2", "4 pipeline stages", "Nearest: 4")),
        ({"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 5}, ("=5", "2 pipeline stages", "Nearest: 4")),
        (
            {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 8, "per_device_batch_size": 1.0},
            ("8 rows", "multiple of 32"),
        ),
        (
            {"ici_pipeline_parallelism": 2, "num_kv_shared_layers": 2, "layer_pattern": ["global"]},
            ("num_kv_shared_layers=2", "another stage"),
        ),
        ({"ici_pipeline_parallelism": 2, "logical_axis_rules": ["embed=pipeline+fsdp"]}, ("pipeline comes last",)),
    ],
)
def test_what_no_pipeline_can_run_is_refused(overrides, words):
    refused(8, words, **overrides)


def test_the_screen_says_stages_repeats_microbatches_and_the_bubble():
    made = toy({"pipeline": 2, "fsdp": 2}, **LAYERS, **TWICE)
    assert made.plan.pipeline is not None
    words = "2 stages x 2 repeats x 1 layer; 2 microbatches in 5 iterations, bubble 20.0 %"
    assert made.plan.pipeline.describe() == words


def test_between_slices_only_the_stream_and_gradients_travel():
    """Stages own their layers and everything outside is whole along the pipeline; if the user asks for rounds, the plan
    says what crosses."""
    across = {"dcn_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "dcn_data_parallelism": 1}
    plans = {}
    for repeats in (-1, 2):
        cfg = toy_config(**LAYERS, **across, num_pipeline_repeats=repeats)
        plans[repeats] = planner.make(cfg, decoder.declare(cfg), cpu(4, slices=2))
    home, away = plans.values()
    assert home.pipeline.owned and home.layout.spec(("vocab", "embed")) == PartitionSpec(None, "fsdp")
    assert home.layout.spec((STAGE_LAYERS, "embed")) == PartitionSpec("pipeline", "fsdp")
    assert home.layout.spec(("activation_batch",)) == PartitionSpec(("pipeline", "fsdp"))
    assert not any("cross" in note for note in home.notes)
    assert any("4 layers cross 2 slices" in note for note in away.notes)


@pytest.mark.parametrize("how", [ONCE, TWICE], ids=["once", "twice"])
@pytest.mark.parametrize("policy", ["full", "minimal"])
def test_what_a_stage_keeps_for_the_backward_pass(policy, how):
    """Of every iteration, bubbles too, what the policy keeps of each layer, and no weights."""
    made = toy({"pipeline": 2, "fsdp": 2}, **LAYERS, remat_policy=policy, **FOUR, **how)
    cfg, plan = made.cfg, made.plan.pipeline
    assert plan is not None
    rows = made.put_rows(BATCH)
    with jax.set_mesh(made.mesh):
        loss_of = lambda p: loss.sums(cfg, made.layout, p, rows).nll  # noqa: E731
        saved = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss_of, p)[1], made.params))
    kept = sum(leaf.size for leaf in saved if leaf.ndim > 1 and leaf.shape[0] == plan.iterations)
    heads = cfg.head_dim * (cfg.num_query_heads + 2 * cfg.num_kv_heads)
    widths = {"full": cfg.emb_dim, "minimal": cfg.emb_dim + heads + cfg.emb_dim + 2 * cfg.mlp_dim}
    tokens = rows["inputs"].size // plan.microbatches
    assert kept == plan.iterations * plan.stages * plan.depth * tokens * widths[policy]
