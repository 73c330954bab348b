"""Key/value heads that the tensor degree does not divide: refused, or replicated in groups with the same gradients."""

from __future__ import annotations

import pytest

from MaxText.errors import PlanError
from tests.helpers import assert_close, toy, toy_batch

FEATURES = {"attention_bias": True, "use_qk_norm": True, "qk_norm_type": "projection"}


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_replicated_heads_have_the_gradients_of_one_device(kv_heads):
    model = {"base_num_kv_heads": kv_heads, **FEATURES}
    wanted, one = toy(**model).gradients(toy_batch())
    made = toy({"fsdp": 2, "tensor": 4}, **model, shard_kv_heads=False)
    found, split = made.gradients(toy_batch())
    assert_close(found, wanted)
    assert split["loss"] == pytest.approx(one["loss"], rel=1e-6)
    key = made.params["decoder"]["layers"]["0"]["attention"]["key"]
    assert key.sharding.shard_shape(key.shape)[2] == kv_heads  # whole over tensor


def test_they_are_refused_unless_asked():
    with pytest.raises(PlanError, match="shard_kv_heads=false") as caught:
        toy({"tensor": 4})
    assert caught.value.id == "plan.divisibility" and "num_kv_heads=2" in str(caught.value)


def test_query_heads_must_divide():
    with pytest.raises(PlanError, match="num_query_heads=4") as caught:
        toy({"tensor": 8}, shard_kv_heads=False, base_mlp_dim=64)
    assert "num_kv_heads" not in str(caught.value).replace("num_query_heads", "")
