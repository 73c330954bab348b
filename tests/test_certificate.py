"""The certificate's own check: cells that must hold, and mistakes that it must find. All cells: the script itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks import certificate
from MaxText import session

DENSE = "dense GQA"


@pytest.mark.parametrize("cut", [("fsdp", "tensor"), ("data", "fsdp_transpose")])
def test_a_cut_changes_no_gradient(cut):
    cell = certificate.certify(DENSE, cut)
    assert cell.holds and not cell.refused, str(cell)
    assert 0 < cell.gradient < certificate.BAR and cell.bytes_found == cell.bytes_planned > 0


def test_one_wrong_token_on_the_mesh_is_found(monkeypatch):
    put = session.put_microbatches

    def wrong(mesh, plan, batch):
        targets = batch["targets"].copy()
        targets[0, 0] = (targets[0, 0] + 1) % 96
        return put(mesh, plan, batch | {"targets": targets})

    certificate.reference(DENSE)
    monkeypatch.setattr(session, "put_microbatches", wrong)
    cell = certificate.certify(DENSE, ("fsdp", "tensor"))
    assert not cell.holds and "FAILS" in str(cell)


def test_a_wrong_byte_is_found_and_a_refusal_is_told():
    cell = certificate.Cell(DENSE, ("data",), 0.0, 1e-7, "x", 12, 12)
    assert cell.holds and not dataclasses.replace(cell, bytes_found=13).holds
    assert not dataclasses.replace(cell, loss=2e-5).holds
    assert not dataclasses.replace(cell, refused="too many devices").holds
    page = certificate.document([cell, dataclasses.replace(cell, cut=("expert",), refused="no experts")])
    assert "1 cells, of\nwhich 1 hold, and 1 refusals" in page and "- dense GQA: no experts" in page


def test_every_axis_and_every_pair_is_a_cut():
    assert len(certificate.CUTS) == 7 + 21 and len(set(certificate.CUTS)) == 28
    assert set(certificate.AXES) == set(certificate.planner.MESH_AXES)


def test_what_is_not_finite_is_wrong(monkeypatch):
    """NaN compares with nothing: as the second of two errors `max` would pass it by."""
    found = [(1.0, {"a": np.ones(3), "b": np.ones(3)})] * certificate.STEPS
    nowhere = [(1.0, {"a": np.ones(3), "b": np.array([1.0, np.nan, 1.0])})] * certificate.STEPS
    monkeypatch.setattr(certificate, "reference", lambda block: found)
    for steps in (nowhere, [*found[:-1], (float("nan"), found[0][1])]):
        monkeypatch.setattr(certificate.World, "steps", lambda self, block, steps=steps: steps)
        assert not certificate.certify(DENSE, ("data",)).holds
    monkeypatch.setattr(certificate.World, "steps", lambda self, block: found)
    assert certificate.certify(DENSE, ("data",)).holds


@pytest.mark.parametrize("wrong", ["cut=fsdp+tenser", "cut=data+data", "dense", "part=0/4", "part=5/4", "only=1"])
def test_what_does_not_exist_is_refused(wrong, capsys):
    assert certificate.main([wrong]) == 2
    assert wrong.split("=")[0] in capsys.readouterr().err or "tenser" in wrong
