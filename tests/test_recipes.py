"""Every recipe of configs/models: exact parameter counts, a type check at full size, twenty steps when shrunk."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import AbstractMesh, AxisType

from MaxText import architecture, blueprint, config, data, decoder, flops, optimizer, planner, state, step, tokenizer

ROOT = Path(__file__).resolve().parent.parent
# Counted from the released models' reference implementations: all parameters (with correction biases and the layers'
# output scales, which are buffers there), and those that one token passes. (The last norm of GPT-3 has
# a bias, 12,288 numbers: see test_maxtext_files. It is in both; a published table of active ones leaves it out.)
COUNTS = """
    deepseek-v2-236b               235_741_434_880    20_851_512_320
    deepseek-v2-lite-16b            15_706_484_224     2_451_435_008
    deepseek-v3-671b               671_026_419_200    36_625_603_584
    deepseek-v3.2-671b             671_877_944_064    37_477_128_448
    gemma-2b                         2_506_172_416     2_506_172_416
    gemma-7b                         8_537_680_896     8_537_680_896
    gemma2-27b                      27_227_128_320    27_227_128_320
    gemma2-2b                        2_614_341_888     2_614_341_888
    gemma2-9b                        9_241_705_984     9_241_705_984
    gemma3-12b                      11_766_034_176    11_766_034_176
    gemma3-1b                          999_885_952       999_885_952
    gemma3-270m                        268_098_176       268_098_176
    gemma3-27b                      27_009_346_304    27_009_346_304
    gemma3-4b                        3_880_263_168     3_880_263_168
    gemma4-26b-a4b                  25_233_141_790     3_822_530_590
    gemma4-31b                      30_697_345_340    30_697_345_340
    gemma4-e2b                       4_628_569_379     2_279_759_139
    gemma4-e4b                       7_463_013_418     4_644_441_130
    gpt-oss-120b                   116_829_156_672     5_132_849_472
    gpt-oss-20b                     20_914_757_184     3_608_307_264
    gpt3-175b                      174_604_836_864   174_579_671_040
    kimi-k2-1t                   1_026_408_232_448    31_687_072_768
    llama2-13b                      13_015_864_320    12_852_024_320
    llama2-70b                      68_976_648_192    68_714_504_192
    llama2-7b                        6_738_415_616     6_607_343_616
    llama3-70b                      70_553_706_496    69_503_033_344
    llama3-8b                        8_030_261_248     7_504_924_672
    llama3.1-405b                  405_853_388_800   403_752_042_496
    llama3.1-70b                    70_553_706_496    69_503_033_344
    llama3.1-8b                      8_030_261_248     7_504_924_672
    llama3.2-1b                      1_235_814_400     1_235_814_400
    llama3.2-3b                      3_212_749_824     3_212_749_824
    llama3.3-70b                    70_553_706_496    69_503_033_344
    llama4-maverick-17b-128e       400_711_848_960    16_150_205_440
    llama4-scout-17b-16e           107_769_861_120    16_138_408_960
    ministral-3-14b                 13_506_073_600    12_834_984_960
    ministral-3-3b                   3_429_006_336     3_429_006_336
    ministral-3-8b                   8_489_553_920     7_952_683_008
    mistral-7b-v0.1                  7_241_732_096     7_110_660_096
    mistral-7b-v0.3                  7_248_023_552     7_113_805_824
    mistral-large-2411             122_610_069_504   122_207_416_320
    mistral-large-3                673_421_097_216    39_007_443_968
    mistral-nemo-12b                12_247_782_400    11_576_693_760
    mistral-small-24b-2501          23_572_403_200    22_901_314_560
    mistral-small-3.1-24b           23_572_403_200    22_901_314_560
    mistral-small-4-119b           118_972_826_624     6_095_717_376
    mixtral-8x22b                  140_630_071_296    38_960_142_336
    mixtral-8x7b                    46_702_792_704    12_748_853_248
    olmo2-13b                       13_716_198_400    13_202_396_160
    olmo2-7b                         7_298_617_344     6_887_575_552
    olmo3-32b                       32_233_522_176    31_720_098_816
    olmo3-7b-pt                      7_298_011_136     6_887_272_448
    olmo3-7b                         7_298_011_136     6_887_272_448
    qwen2.5-0.5b                       494_032_768       494_032_768
    qwen2.5-1.5b                     1_543_714_304     1_543_714_304
    qwen2.5-7b                       7_615_616_512     7_070_619_136
    qwen3-0.6b                         596_049_920       596_049_920
    qwen3-1.7b                       1_720_574_976     1_720_574_976
    qwen3-14b                       14_768_307_200    13_990_394_880
    qwen3-235b-a22b                235_093_634_560    21_568_433_664
    qwen3-30b-a3b                   30_532_122_624     3_041_867_776
    qwen3-32b                       32_762_123_264    31_984_210_944
    qwen3-4b                         4_022_468_096     4_022_468_096
    qwen3-8b                         8_190_735_360     7_568_405_504
    qwen3-coder-480b-a35b          480_154_875_392    34_541_270_528
"""
EXPECTED = {name: (int(total), int(active)) for name, total, active in map(str.split, COUNTS.strip().splitlines())}


def test_every_recipe_has_its_counts():
    assert {file.stem for file in (ROOT / "configs" / "models").glob("*.yml")} == set(EXPECTED)


@pytest.mark.parametrize("model_name", EXPECTED)
def test_parameters_to_the_last_digit(model_name):
    cfg = config.make(model_name=model_name)
    tree = decoder.declare(cfg)
    assert (blueprint.count(tree), flops.active_parameters(cfg, tree)) == EXPECTED[model_name]


@pytest.mark.parametrize("model_name", EXPECTED)
def test_matmul_weights_are_the_kernels_that_a_token_passes(model_name):
    cfg = config.make(model_name=model_name)
    tree = decoder.declare(cfg)
    gentle = sum(p.size for _, p in blueprint.leaves(tree) if p.kind in ("norm",))
    weights, active = flops.weights_per_token(cfg), flops.active_parameters(cfg, tree)
    assert weights <= active  # the rest are norms and biases
    assert active - weights < max(2 * gentle, 0.005 * active)


def abstract(**degrees):
    shape = dict.fromkeys(planner.MESH_AXES, 1) | degrees
    mesh = AbstractMesh(tuple(shape.values()), planner.MESH_AXES, axis_types=(AxisType.Explicit,) * len(shape))
    return mesh, planner.make_layout(shape)


QUICK = ("llama3.1-70b", "gemma3-12b", "gemma4-26b-a4b", "gpt-oss-120b", "deepseek-v3.2-671b", "llama4-scout-17b-16e")


@pytest.mark.parametrize(
    "model_name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]
)
def test_the_train_step_type_checks_at_full_size(model_name):
    cfg = config.make(
        model_name=model_name, dtype="bfloat16", max_target_length=4096, remat_policy="full", scan_layers=True
    )
    mesh, layout = abstract(data=2, fsdp=16)
    tree = decoder.declare(cfg)
    tx = optimizer.make(cfg, tree, layout)
    with jax.sharding.use_abstract_mesh(mesh):
        made = jax.eval_shape(lambda: state.init(cfg, layout, tree, tx))
        dims = layout.spec((None, "activation_batch", "activation_length"))
        one = jax.ShapeDtypeStruct((1, 32, 4096), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, dims))
        after, metrics = jax.eval_shape(
            step.make_train_step(cfg, layout, tx), made, dict.fromkeys(step.BATCH_KEYS, one)
        )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), made)
    assert metrics["loss"].shape == ()


# Numbers that shape no array and switch nothing on or off, and names.
NO_KIND = (
    "model_name", "run_name", "decoder_block", "rope_max_timescale", "rope_factor", "rope_low_freq_factor",
    "rope_high_freq_factor", "original_max_position_embeddings", "max_position_embeddings", "beta_fast", "beta_slow",
    "mscale", "query_pre_attn_scalar", "normalization_layer_epsilon", "routed_scaling_factor",
)  # fmt: skip


def kind_of(model_name):
    """What the shrunk recipe is, but for NO_KIND; and whether its use of experts is balanced by a loss."""
    values = architecture.scale_down(config.make(model_name=model_name)).as_dict()
    values["load_balance_loss_weight"] = values["load_balance_loss_weight"] > 0
    return str([value for key, value in values.items() if key not in NO_KIND])


KINDS = {kind_of(name): name for name in EXPECTED}  # recipes that shrink to the same model need one run
EXAMPLES = ("gemma2-9b", "gpt-oss-20b", "llama3.2-3b", "qwen3-coder-480b-a35b", "deepseek-v3-671b")
STEPS = 20


@functools.cache
def text():
    """Rows of the shipped text, and their step's batch."""
    cfg = config.make(max_target_length=64, steps=STEPS)
    return data.open_split(cfg, tokenizer.make(cfg), "train", 8)


@pytest.mark.parametrize(
    "model_name", [name if name in EXAMPLES else pytest.param(name, marks=pytest.mark.slow) for name in KINDS.values()]
)
def test_shrunk_recipes_train_on_the_shipped_text(model_name):
    """Twenty steps: the mean loss of the last five is well below that of uniform bytes, and of the first steps."""
    cfg = toy.small(model_name, learning_rate=3e-3, steps=STEPS, max_target_length=64, warmup_steps_fraction=0.1)
    world, layout = toy.mesh(fsdp=2)
    tree = decoder.declare(cfg)
    tx = optimizer.make(cfg, tree, layout)
    with jax.set_mesh(world):
        params = toy.place(
            cfg, toy.fresh(cfg), world, layout
        )  # XLA takes longer over initial values than over the step
        now = state.TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))
        train_step = jax.jit(step.make_train_step(cfg, layout, tx), donate_argnums=0)
        losses = []
        for number in range(STEPS):
            arrays = {name: x[None] for name, x in text().batch(number).items()}
            now, metrics = train_step(now, toy.put(arrays, world, layout))
            losses.append(float(metrics["lm_loss"]))
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < min(np.mean(losses[:3]) - 0.5, np.log(288) - 1.0), losses


def test_the_examples_are_kinds_of_their_own():
    assert set(EXAMPLES) <= set(KINDS.values())
