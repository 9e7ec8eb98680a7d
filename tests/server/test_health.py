"""Readiness names the broken part of an index; a bundle's probe shows a broken model."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import wire
from makers import read_manifest
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import write_manifest
from retrieval.bundle.probe import coded, probe_fault, probe_of, vector_of
from retrieval.errors import BundleError
from retrieval.index.index import create_index, open_index

from retrieval_server.decoder_processes import Undecodable
from retrieval_server.readiness import Readiness
from retrieval_server.served_index import Served, Workers
from retrieval_server.settings import Settings

OK = dict.fromkeys(("index", "search", "model"), "ok")


@contextmanager
def readiness_of(index: Any, **settings: Any) -> Iterator[Readiness]:
    content = Settings(deadline=5.0, **settings)
    with closing(Workers(content)) as workers:
        yield Readiness(Served("i", index, content, workers))


def checked(readiness: Readiness) -> dict[str, str]:
    asyncio.run(readiness.probe())
    return readiness.checks()


def test_a_server_that_cannot_decode_images_is_not_ready_and_logs_the_cause(index_path, caplog):
    def refuse():
        raise Undecodable("none starts") from PermissionError(13, "denied", "/root/python")

    with open_index(index_path, threads=1) as index, readiness_of(index) as readiness:
        assert "has not been run" in readiness.reason()
        assert checked(readiness) == OK and readiness.reason() is None
        decoders = readiness._served.workers.decoders
        for pid in decoders.pids:
            os.kill(pid, signal.SIGKILL)
        wire.until(lambda: not any(worker.process.is_alive() for worker in decoders._idle))
        decoders._start = refuse
        content = checked(readiness)
        assert "cannot decode images" in content["search"] and content["index"] == "ok"
        assert "denied: '/root/python'" in caplog.text
        del decoders._start
        assert checked(readiness) == OK


@pytest.fixture
def probing(makers, tmp_path):
    """A function that makes a bundle with a probe.

    It adds `spoil` to the first number of the probe's vector, or of the vector of a variant `of`.
    """

    def make(name, spoil=0.0, of=None, **options):
        path = makers.make_bundle(tmp_path / name, **options)
        manifest = read_manifest(path)
        opened = {
            variant: Bundle.open(path, variant=variant, threads=1)
            for variant in (None, *manifest.variants)
        }
        probe = probe_of(opened, (0.0, 1.0))
        vector = vector_of(probe.vector if of is None else probe.variants[of])
        assert abs(np.linalg.norm(vector) - 1) < 1e-5
        vector[0] += spoil
        changed = {"vector": coded(vector)} if of is None else {"variants": {of: coded(vector)}}
        write_manifest(
            path, manifest.model_copy(update={"probe": probe.model_copy(update=changed)})
        )
        return path

    return make


@pytest.mark.parametrize(
    "options", [{}, {"kind": "features"}, {"query_vectors": True}, {"side": 5}]
)
def test_the_probe_of_a_right_model_is_near_and_that_of_a_wrong_one_is_not(probing, options):
    for name, spoil in (("right", 0.0), ("near", 5e-5)):
        assert probe_fault(Bundle.open(probing(name, spoil, **options), threads=1)) is None
    fault = probe_fault(Bundle.open(probing("wrong", 3e-4, **options), threads=1))
    assert re.search(r"model is broken.* differs by 0\.0003 .*0\.0001 is allowed", fault)


def test_a_variant_has_its_own_vector_and_tolerance(probing):
    path = probing("b", 0.3, "fp16", variant=True)
    assert probe_fault(Bundle.open(path, threads=1)) is None
    assert "0.001 is allowed" in probe_fault(Bundle.open(path, threads=1, variant="fp16"))
    near = probing("near", 0.01, "fp16", variant=True)
    assert probe_fault(Bundle.open(near, threads=1, variant="fp16")) is None


@pytest.mark.parametrize("key", ["pattern", "vector"])
def test_a_probe_that_does_not_fit_its_encoder_is_reported(probing, key):
    path = probing("b")
    manifest = read_manifest(path)
    few, odd = coded(np.zeros(3, np.float32)), coded(np.full(16, np.nan, np.float32))
    for text in (few, odd, "AAAA"):  # the last has 3 bytes, less than one number
        probe = manifest.probe.model_copy(update={key: text})
        write_manifest(path, manifest.model_copy(update={"probe": probe}))
        assert probe_fault(Bundle.open(path, threads=1)) is not None
    for text in ("", "=", "é", "AAA", "A" * 1_000_000):
        probe = manifest.probe.model_copy(update={key: text})
        write_manifest(path, manifest.model_copy(update={"probe": probe}))
        with pytest.raises(BundleError, match=f"probe.{key}"):
            Bundle.open(path, threads=1)


def test_a_model_that_is_wrong_from_the_start_is_not_served(probing, photos, tmp_path, cli):
    create_index(tmp_path / "i", probing("wrong", 0.1), [photos / "1"], progress=False)
    done = cli("serve", tmp_path / "i", "--port", "0")
    assert done.code == 2 and "is not served. The model is broken" in done.err
    with open_index(tmp_path / "i", threads=1) as index, readiness_of(index) as readiness:
        content = checked(readiness)  # a migration could serve such a bundle
    assert "bundle's probe" in content.pop("model") and set(content.values()) == {"ok"}


def test_the_probe_shows_a_model_that_becomes_wrong(probing, makers, photos, tmp_path, monkeypatch):
    create_index(tmp_path / "i", probing("right"), [photos / "1"], progress=False)
    other = Bundle.open(makers.make_bundle(tmp_path / "other", seed=9), threads=1)
    with open_index(tmp_path / "i", threads=1) as index, readiness_of(index) as readiness:
        assert checked(readiness) == OK
        monkeypatch.setattr(index.bundle, "encode", other.encode)
        assert "model is broken" in checked(readiness)["model"]
