"""From `import retrieval` to a served index; text paths; progress."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
import retrieval

from .conftest import SMALL


def test_from_import_to_a_served_index_in_ten_lines(
    cache: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photos)
    query = next(photos.glob("0/*.png"))
    # the ten lines
    run = retrieval.train(SMALL, "runs/digits")
    retrieval.evaluate_run(run)
    bundle = retrieval.export_run(run)
    index = retrieval.build_index(bundle, "photos", "photos.index")
    hits = index.search(query, k=3)
    server = retrieval.serve(index, port=0, wait=False)
    assert server is not None
    # and one question
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="q.png"\r\n\r\n'
    number = b'\r\n--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n3\r\n--b--\r\n'
    request = urllib.request.Request(
        f"{server.url}v1/search",
        data=head + query.read_bytes() + number,
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.load(answer)["results"]
    finally:
        server.close()
    assert [each["id"] for each in found] == [hit.id for hit in hits]
    assert hits[0].distance == pytest.approx(0, abs=1e-4) and hits[0].label == "0"
    assert "stopped" in repr(server)
    assert len(index.search(query, k=1)) == 1  # yours is still open
    index.close()


def test_what_comes_back_says_what_it_is(
    trained: retrieval.Run, photos: Path, tmp_path: Path
) -> None:
    bundle = retrieval.export_run(trained, str(tmp_path / "bundle"), progress=False)
    with retrieval.build_index(
        str(tmp_path / "bundle"), str(photos), str(tmp_path / "index"), progress=False
    ) as index:
        assert index.summary is not None and index.summary.count == len(index) == 60
        said = [repr(trained), repr(bundle), repr(index), repr(trained.recipe)[:2000]]
    assert (
        "core.digits, core.convnet, pml.triplet_margin" in said[0] and str(trained.path) in said[0]
    )
    assert "images of 1 × 8 × 8 to vectors of 16" in said[1]
    assert "60 items" in said[2] and "vectors of 16" in said[2]
    assert all(text.count("\n") <= 1 and len(text) < 300 for text in said[:3])


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_text_or_paths(
    kind: type[str] | type[Path], trained: retrieval.Run, photos: Path, tmp_path: Path
) -> None:
    run = retrieval.load_run(kind(trained.path))
    retrieval.evaluate_run(run, progress=False)
    retrieval.export_run(kind(trained.path), kind(tmp_path / "bundle"), progress=False)
    assert retrieval.open_bundle(kind(tmp_path / "bundle")).manifest.vector == 16
    retrieval.build_index(
        kind(tmp_path / "bundle"), kind(photos), kind(tmp_path / "i"), progress=False
    ).close()
    with retrieval.open_index(kind(tmp_path / "i")) as index:
        assert len(index) == 60
    retrieval.evaluate_run(run, bundle=kind(tmp_path / "bundle"), progress=False)
    retrieval.verify_run(run, draw=40, folds=2, bundle=kind(tmp_path / "bundle"), progress=False)


def test_progress_off_prints_nothing(
    cache: Path, photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = retrieval.train(SMALL, tmp_path / "run", progress=False)
    retrieval.evaluate_run(run, progress=False)
    retrieval.verify_run(run, draw=40, folds=2, progress=False)
    bundle = retrieval.export_run(run, progress=False)
    retrieval.build_index(bundle, photos, tmp_path / "index", progress=False).close()
    assert capfd.readouterr() == ("", "")


def test_progress_is_told_to_a_function(cache: Path, photos: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []

    def note(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    run = retrieval.train(SMALL, tmp_path / "run", progress=note)
    assert ("training", 10, 10) in told
    retrieval.evaluate_run(run, progress=note)
    assert any(what == "encoding" and done == total for what, done, total in told)
    bundle = retrieval.export_run(run, progress=note)
    assert any("bundle" in what for what, _, _ in told)
    retrieval.build_index(bundle, photos, tmp_path / "index", progress=note).close()
    assert ("encoding", 60, 60) in told


def test_lines_of_training_go_to_report(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    retrieval.train(SMALL, tmp_path / "run", progress=False, report=lines.append)
    assert any(line.startswith("epoch 1: loss") for line in lines)
    assert capsys.readouterr().out == ""
