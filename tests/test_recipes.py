"""Every recipe of configs/models: exact parameter counts, a type check at full size, two steps of its shrunk self; and
model files in MaxText's vocabulary."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import AbstractMesh, AxisType

from MaxText import architecture, blueprint, config, decoder, flops, optimizer, planner, state, step

ROOT = Path(__file__).resolve().parent.parent
# Counted from the released models' reference implementations: all parameters (with correction biases and the layers'
# output scales, which are buffers there), and those that one token passes. (GPT-3's with the bias of its last norm.)
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


def shrunk(model_name):
    """The shrunk recipe without its names."""
    values = architecture.scale_down(config.make(model_name=model_name)).as_dict()
    return str([value for key, value in values.items() if key not in ("model_name", "run_name", "decoder_block")])


KINDS = {shrunk(name): name for name in EXPECTED}  # recipes that shrink to the same model need one run


@pytest.mark.slow
@pytest.mark.parametrize("model_name", KINDS.values())
def test_shrunk_recipes_train(model_name):
    cfg = toy.small(model_name, learning_rate=1e-3, steps=10, warmup_steps_fraction=0.0)
    world, layout = toy.mesh(fsdp=2)
    tree = decoder.declare(cfg)
    tx = optimizer.make(cfg, tree, layout)
    arrays = {name: x[None] for name, x in toy.batch(cfg, rows=4).items()}
    with jax.set_mesh(world):
        now = jax.jit(lambda: state.init(cfg, layout, tree, tx))()
        train_step = jax.jit(step.make_train_step(cfg, layout, tx))
        batch = toy.put(arrays, world, layout)
        losses = []
        for _ in range(2):
            now, metrics = train_step(now, batch)
            losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and losses[1] < losses[0]


MAXTEXT_FILES = {
    "gemma2-9b": """
        base_emb_dim: 3584
        base_num_query_heads: 16
        base_num_kv_heads: 8
        base_mlp_dim: 14336
        base_num_decoder_layers: 21
        head_dim: 256
        mlp_activations: ["gelu","linear"]
        vocab_size: 256000
        decoder_block: "gemma2"
        normalization_layer_epsilon: 1.e-06
        logits_via_embedding: true
        final_logits_soft_cap: 30.0
        attn_logits_soft_cap: 50.0
        sliding_window_size: 4096
        use_post_attn_norm: true
        use_post_ffw_norm: true""",
    "gemma4-26b-a4b": """
        base_num_decoder_layers: 30
        base_emb_dim: 2816
        base_num_query_heads: 16
        base_num_kv_heads: 8
        base_mlp_dim: 2112
        base_moe_mlp_dim: 704
        mlp_activations: ["gelu","linear"]
        head_dim: 256
        global_head_dim: 512
        global_num_kv_heads: 2
        vocab_size: 262144
        decoder_block: "gemma4"
        normalization_layer_epsilon: 1e-6
        logits_via_embedding: true
        sliding_window_size: 1024
        use_post_attn_norm: true
        use_post_ffw_norm: true
        share_kv_projections: true
        local_rope_max_timescale: 10000
        global_rope_max_timescale: 1000000
        rope_max_timescale: 1000000
        global_rope_proportion: 0.25
        local_rope_proportion: 1.0
        v_norm_with_scale: false
        final_logits_soft_cap: 30.0
        float32_qk_product: true
        num_experts: 128
        num_experts_per_tok: 8
        shared_experts: 1
        norm_topk_prob: true
        image_size_for_vit: [672, 960]
        image_placeholder: "<|image|>" """,
    "gpt-oss-20b": """
        base_emb_dim: 2880
        base_num_query_heads: 64
        base_num_kv_heads: 8
        head_dim: 64
        sliding_window_size: 128
        attention_bias: true
        attention_sink: true
        rope_type: "yarn"
        rope_max_timescale: 150_000
        max_position_embeddings: 131072
        original_max_position_embeddings: 4096
        rope_factor: 32
        beta_fast: 32
        beta_slow: 1
        rope_interleave: false
        rope_truncate: false
        rope_attention_scaling: true
        base_mlp_dim: 2880
        base_moe_mlp_dim: 2880
        mlp_activations: ["sigmoid","linear"]
        mlp_activations_limit: 7.0
        routed_bias: true
        mlp_bias: true
        num_experts: 32
        num_experts_per_tok: 4
        base_num_decoder_layers: 24
        vocab_size: 201088
        normalization_layer_epsilon: 1.0e-5
        enable_dropout: false
        logits_via_embedding: false
        decoder_block: "gpt_oss"
        inhomogeneous_layer_cycle_interval: 2""",
    "llama4-maverick-17b-128e": """
        decoder_block: "llama4"
        mlp_activations: ["silu","linear"]
        enable_dropout: false
        tokenizer_type: "huggingface"
        base_emb_dim: 5120
        base_num_decoder_layers: 48
        base_num_query_heads: 40
        base_num_kv_heads: 8
        head_dim: 128
        base_mlp_dim: 16384
        base_moe_mlp_dim: 8192
        vocab_size: 202048
        normalization_layer_epsilon: 1e-05
        rope_max_timescale: 500000
        rope_type: "llama3.1"
        rope_use_scale: false
        num_experts: 128
        shared_experts: 1
        num_experts_per_tok: 1
        use_qk_norm: false
        nope_layer_interval: 4
        interleave_moe_layer_step: 2
        inhomogeneous_layer_cycle_interval: 4
        temperature_tuning: true
        chunk_attn_window_size: 8192
        vision_encoder_block: "llama4" """,
    "kimi-k2-1t": """
        base_emb_dim: 7168
        base_num_query_heads: 64
        base_num_kv_heads: 64
        base_mlp_dim: 18432
        base_moe_mlp_dim: 2048
        base_num_decoder_layers: 61
        first_num_dense_layers: 1
        mlp_activations: ["silu", "linear"]
        vocab_size: 163840
        enable_dropout: false
        logits_via_embedding: false
        normalization_layer_epsilon: 1.0e-6
        num_experts: 384
        num_experts_per_tok: 8
        shared_experts: 1
        routed_scaling_factor: 2.827
        routed_score_func: "sigmoid"
        routed_bias: true
        decoder_block: "deepseek"
        attention_type: "mla"
        q_lora_rank: 1536
        kv_lora_rank: 512
        qk_nope_head_dim: 128
        qk_rope_head_dim: 64
        v_head_dim: 128
        mscale: 1.0
        rope_type: "yarn"
        rope_max_timescale: 50000
        max_position_embeddings: 131072
        original_max_position_embeddings: 4096
        rope_factor: 32
        beta_fast: 1
        beta_slow: 1""",
}


@pytest.mark.parametrize("model_name", MAXTEXT_FILES)
def test_a_file_in_maxtext_words_is_the_same_architecture(model_name, tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text("\n".join(line.strip() for line in MAXTEXT_FILES[model_name].splitlines()))
    theirs, ours = config.make(model_name=str(path)), config.make(model_name=model_name)
    assert architecture.segments(theirs) == architecture.segments(ours)
    assert decoder.declare(theirs) == decoder.declare(ours)


def test_a_bundle_lies_below_the_file_that_chose_it(tmp_path):
    mine = tmp_path / "mine.yml"
    mine.write_text("decoder_block: gemma2\nfinal_logits_soft_cap: 5.0\n")
    cfg = config.load([str(ROOT / "configs" / "base.yml"), f"model_name={mine}"], {})
    assert (cfg.final_logits_soft_cap, cfg.attn_logits_soft_cap, cfg.num_decoder_layers) == (5.0, 50.0, 8)
    assert "gemma2.yml" in cfg.origin("attn_logits_soft_cap")
    with pytest.raises(config.InvalidConfig) as caught:
        config.load([str(ROOT / "configs" / "base.yml"), f"model_name={mine}", "attn_logits_soft_cap=1"], {})
    assert caught.value.ids == ("config.model-override",)
    by_hand = config.load([str(ROOT / "configs" / "base.yml"), "decoder_block=gemma2", "attn_logits_soft_cap=1"], {})
    assert (by_hand.attn_logits_soft_cap, by_hand.use_post_attn_norm) == (1.0, True)


def test_an_unknown_block_is_refused_by_name():
    with pytest.raises(config.InvalidConfig, match="gemma3") as caught:
        config.make(decoder_block="gemma33")
    assert caught.value.ids == ("config.unknown-block",)
    with pytest.raises(config.InvalidConfig) as caught:
        config.make().replace(decoder_block="gemma3")
    assert caught.value.ids == ("config.replace-model",)
