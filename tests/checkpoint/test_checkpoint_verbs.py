"""The verbs of checkpoints, on folders made by the store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from MaxText import cli
from MaxText.checkpoint import Store
from tests.checkpoint.helpers import state


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run with steps 10 to 60; 30 never finished."""
    folder = tmp_path_factory.mktemp("run")
    with Store(folder / "checkpoints", asynchronous=False) as store:
        for step in (10, 20, 30, 40, 50, 60):
            store.save(step, state(step // 40), {"config": {"steps": step, "seed": 0}, "data": {"files": "a"}})
    (folder / "checkpoints" / "30" / "manifest.json").unlink()
    return folder


@pytest.fixture
def run_folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def verb(capsys, *arguments: object) -> tuple[int, str]:
    code = cli.main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out + captured.err


def steps(folder: Path) -> list[int]:
    return Store(folder / "checkpoints").steps()


def test_ls(capsys, made):
    code, text = verb(capsys, "ls", made)
    lines = text.splitlines()
    assert code == 0 and [line.split()[0] for line in lines] == ["10", "20", "30", "40", "50", "60"]
    assert "not usable" in lines[2] and "did not finish" in lines[2] and "bytes" in lines[0] and "arrays" in lines[0]


def test_verify(capsys, run_folder):
    assert verb(capsys, "verify", run_folder)[0] == 0
    file = next(path for path in (run_folder / "checkpoints/40/state").rglob("0.0"))
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    code, text = verb(capsys, "verify", run_folder)
    assert code == 7 and "60: intact" in text and file.parent.name in text and "CRC" in text
    assert verb(capsys, "verify", run_folder, "step=50")[0] == 0
    assert verb(capsys, "verify", run_folder, "step=30")[0] == 7


def test_verify_names_what_cannot_be_used(capsys, run_folder):
    code, said = verb(capsys, "verify", run_folder)
    assert code == 0 and "30: no checkpoint: it has no manifest: its save did not finish" in said
    manifest = run_folder / "checkpoints/40/manifest.json"
    manifest.write_text(manifest.read_text().replace("float32", "float16"))
    code, said = verb(capsys, "verify", run_folder)
    assert code == 7 and "40: no checkpoint: its manifest is damaged" in said and "60: intact" in said


def test_a_run_whose_manifests_are_all_damaged(capsys, run_folder):
    for manifest in run_folder.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    assert verb(capsys, "verify", run_folder)[0] == 7
    code, said = verb(capsys, "diff", run_folder, run_folder)
    assert code == 7 and "holds no complete checkpoint" in said and "60: its manifest" in said
    for manifest in run_folder.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    assert verb(capsys, "verify", run_folder)[0] == 7


def test_a_run_may_be_called_a_number(capsys, run_folder, tmp_path):
    run_folder.rename(tmp_path / "2026")
    code, said = verb(capsys, "diff", tmp_path / "2026", tmp_path / "2026/checkpoints/20")
    assert code == 0 and "step 60" in said and "step 20" in said


def test_diff(capsys, made):
    folder = made / "checkpoints"
    code, text = verb(capsys, "diff", folder / "10", folder / "20")
    assert code == 0 and "config steps: 10 | 20" in text and "array" not in text.partition("\n")[2]
    code, text = verb(capsys, "diff", folder / "20", made)
    assert "array params/embed" in text and "seed" not in text and "data" not in text


def test_prune(capsys, run_folder):
    assert verb(capsys, "prune", run_folder, "keep=2", "every=20", "dry_run=true")[1].strip() == "would delete 10"
    assert steps(run_folder) == [10, 20, 40, 50, 60]
    code, text = verb(capsys, "prune", run_folder, "keep=1", "every=20")
    assert code == 0 and steps(run_folder) == [20, 40, 60] and "deleted 10, 50" in text
    assert verb(capsys, "prune", run_folder, "keep=3")[1].strip() == "nothing to delete"


def test_prune_reads_the_newest_first(capsys, run_folder):
    file = next(path for path in (run_folder / "checkpoints/60/state").rglob("0.0"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    code, text = verb(capsys, "prune", run_folder, "keep=1")
    assert code == 7 and "damaged" in text and steps(run_folder) == [10, 20, 40, 50, 60]


def test_prune_leaves_a_running_run_alone(capsys, run_folder):
    with Store(run_folder / "checkpoints", asynchronous=False) as running:
        running.prepare()
        code, text = verb(capsys, "prune", run_folder, "keep=1")
    assert code == 7 and "another process" in text and steps(run_folder) == [10, 20, 40, 50, 60]


@pytest.mark.parametrize(
    "wrong", [[], ["rm"], ["ls"], ["ls", "a", "b"], ["prune", "a"], ["prune", "a", "keep=0"], ["verify", "a", "x=1"]]
)
def test_usage(capsys, wrong):
    code, text = verb(capsys, *wrong)
    assert code == 2 and "cli.usage" in text


def test_prune_without_a_number_says_what_to_type(capsys, made):
    code, text = verb(capsys, "prune", made)
    assert code == 2 and "keep=3" in text and "none" not in text


def test_no_checkpoints(capsys, tmp_path):
    assert verb(capsys, "ls", tmp_path / "nowhere")[0] == 7


def test_retention_keeps_multiples(tmp_path):
    with Store(tmp_path, keep=2, keep_period=20, asynchronous=False) as store:
        for step in range(10, 70, 10):
            store.save(step, state(), {})
    assert store.steps() == [20, 40, 50, 60]
