"""Files behind URLs: every form that can be is read from there; what fails there is one message. No network: fsspec's
own file system in memory, and one that fails as gcsfs does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from MaxText import tokenizer
from MaxText.data import open_split, prepared
from MaxText.data.verbs import data as data_verb
from MaxText.errors import ConfigError, DataError

from .files import write
from .helpers import make_config

TEXTS = [f"document {i} " * 9 for i in range(12)]


class HttpError(Exception):
    """As gcsfs.retry.HttpError: no OSError."""


class Failing(MemoryFileSystem):
    """A bucket that lists its files, and fails when it is asked for what `fails` says."""

    protocol = "failing"
    fails, at = "read", 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("failing://"))

    def info(self, path, **how):
        if self.fails == "info":
            raise HttpError("Anonymous caller does not have storage.objects.list access\nmore lines")
        return super().info(path, **how)

    def _open(self, path, *arguments, **how):
        if self.fails == "open":
            raise HttpError("Forbidden")
        return self if self.fails == "read" else super()._open(path, *arguments, **how)

    def read(self, size):
        raise HttpError("the connection was reset")

    def tell(self):
        return self.at

    def seek(self, offset, whence):
        self.at = 100 if whence == 2 else offset
        return self.at

    def close(self):
        pass


@pytest.fixture(scope="module", autouse=True)
def failing():
    fsspec.register_implementation("failing", Failing)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    system = fsspec.filesystem("memory")

    def put(name: str) -> str:
        system.pipe(f"/bucket/{name}", Path(write(name, TEXTS)).read_bytes())
        return f"memory://bucket/{name}"

    yield put
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


def opened(*files, **more):
    cfg = make_config(train_files=list(files), num_epoch=1, **more)
    return open_split(cfg, tokenizer.make(cfg), "train", 2)


@pytest.mark.parametrize("form", ["txt", "jsonl", "jsonl.gz", "parquet", "tfrecord", "tfrecord.gz"])
def test_a_bucket_is_read_as_a_folder(bucket, form):
    there, here = opened(bucket(f"a.{form}")), opened(f"a.{form}")
    assert there.fingerprint == here.fingerprint
    assert all((there.batch(s)[k] == here.batch(s)[k]).all() for s in range(here.batches) for k in here.batch(s))


@pytest.mark.parametrize("form", ["array_record", "npy"])
def test_forms_that_are_mapped_or_opened_by_path_only_are_refused(bucket, form):
    with pytest.raises(DataError, match=r"mount") as caught:
        opened(bucket(f"a.{form}"))
    assert caught.value.id == "data.local"


def test_an_empty_file(bucket):
    fsspec.filesystem("memory").pipe("/bucket/none.txt", b"")
    with pytest.raises(DataError, match=r"none\.txt") as caught:
        opened("memory://bucket/none.txt")
    assert caught.value.id == "data.empty-file"


@pytest.mark.parametrize("fails", ["info", "open", "read"])
@pytest.mark.parametrize("form", ["txt", "jsonl", "tfrecord", "parquet"])
def test_what_fails_there_is_one_message(bucket, fails, form, monkeypatch):
    bucket(f"a.{form}")
    Failing.store = fsspec.filesystem("memory").store
    monkeypatch.setattr(Failing, "fails", fails)
    with pytest.raises(DataError, match="HttpError: ") as caught:
        opened(f"failing://bucket/a.{form}")
    assert caught.value.id == "data.unreadable" and "more lines" not in str(caught.value)


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DataError, match="gcsfs") as caught:
        opened("gs://bucket/a.txt")
    assert caught.value.id == "data.no-library"


def test_rows_are_prepared_on_this_machine(tmp_path):
    with pytest.raises(DataError) as caught:
        prepared.manifest("gs://bucket/rows")
    assert caught.value.id == "data.local"
    (tmp_path / "run.yml").write_text("steps: 3\n")
    with pytest.raises(ConfigError, match="mount"):
        data_verb(["prepare", str(tmp_path / "run.yml"), "out=gs://bucket/rows"])


@pytest.mark.slow
def test_google_cloud_storage_without_a_network():
    """The real library, if it is there: it tries for half a minute, then there is one message."""
    pytest.importorskip("gcsfs")
    code = (
        "from MaxText.data import sources\nfrom MaxText.errors import DataError\n"
        "try:\n    sources.find(['gs://a-bucket/a.txt'], 'train_files')\n"
        "except DataError as error:\n    print(error.id)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "data.unreadable\n" and done.stderr == ""
