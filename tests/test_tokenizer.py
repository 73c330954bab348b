import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText import config, tokenizer


def make(**keys):
    return tokenizer.make(config.make(**keys))


@given(st.text())
def test_round_trip(text):
    tok = make()
    ids = tok.encode(text)
    assert ids.dtype == np.int32
    assert tok.decode(ids) == text
    assert tok.token_bytes[ids].sum() == len(text.encode())


def test_bytes_and_text_encode_alike():
    assert make().encode("naïve").tolist() == make().encode("naïve".encode()).tolist() == list("naïve".encode())


def test_special_ids_lie_within_the_vocabulary_and_stand_for_no_text():
    tok = make()
    assert len(tok.token_bytes) == tok.vocab_size
    assert {tok.bos_id, tok.eos_id} == set(np.flatnonzero(tok.token_bytes == 0).tolist())
    assert tok.decode([tok.bos_id, *b"ab", tok.eos_id]) == "ab"


@pytest.mark.parametrize("ids", [[258], [-1], [999], [0xC3]])
def test_ids_without_a_text_are_shown(ids):
    assert make().decode([*b"a", *ids, *b"b"]) == "a\N{REPLACEMENT CHARACTER}b"
