"""Commands of the serving half, as a user types them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import fields

import pytest
from click.testing import CliRunner

from retrieval_server.commands import serve_command
from retrieval_server.settings import Settings


@pytest.fixture
def retrieval(process, tmp_path):
    def run(*arguments: object):
        return process("-m", "retrieval.cli", *arguments, cwd=tmp_path, OMP_NUM_THREADS="1")

    return run


MISTAKES = [
    ("index create i photos --bundle {bundle}", "i exists already"),
    ("index create j photos --bundle {bundle}", "1 of 61 items cannot be used"),
    ("index create j photos --bundle {bundle} --set m", "is not KEY=VALUE"),
    ("index create j photos --bundle {bundle} --backend falt", "Did you mean 'flat'"),
    ("index create j photos --bundle {bundle} --batch-size 0", "--batch-size"),
    ("index create j photos --bundle {bundle} --max-bytes 100B", "the limit is 100"),
    ("index create j photos --bundle {bundle} --device gpu", "Did you mean 'cuda'?"),
    ("index create j photos --bundle i", "bundles that embedded its items lie in i/bundles."),
    ("search i photos/bad.png", "is empty"),
    ("search i photos", "is a folder; name the query images"),
    ("search photos photos/3/0003.png", "is not an index"),
    (
        "search photos/3/0003.png i",
        "the index comes first. Write: retrieval search i photos/3/0003.png",
    ),
    ("serve photos", "is not an index"),
    ("search i", "Name an image to search for"),
    ("search i --like 1000", "no item '1000', nor is it a picture"),
    ("search i photos/3/0003.png --group-size 2", "group_size needs group_by"),
    ("search i photos/3/0003.png --facet colour", "has a field 'colour'"),
    ("search i photos/3/0003.png --order-by -colour", "has a field 'colour'"),
    (
        "search i photos/3/0003.png --scores",
        "i is not calibrated. First run: retrieval calibrate i",
    ),
    ("identify i photos/3/0003.png", "i is not calibrated. First run: retrieval calibrate i"),
]


def test_index_and_search_and_their_errors(
    retrieval, cli, monkeypatch, makers, bundle_path, tmp_path
):
    monkeypatch.chdir(tmp_path)
    makers.write_digits(tmp_path / "photos", 60)
    create = ("index", "create", "i", "photos", "--bundle", bundle_path)
    created = retrieval(*create, "--backend", "hnsw", "--set", "m=16")
    assert created.code == 0, created.err
    backends = r"\(back end flat; hnsw only from 20,000 items on\): i"
    assert re.search(rf"Indexed 60 items in .* {backends}", created.out)
    found = retrieval("search", "i", "photos/3/0003.png", "photos/0/0000.png", "-k", "3")
    assert found.code == 0, found.err
    lines = found.out.splitlines()
    assert lines[0] == "Nearest to photos/3/0003.png:" and len(lines) == 11
    assert lines[1].split() == ["rank", "distance", "label", "id"]
    assert lines[2].split() == ["1", "0.0000", "3", "3/0003.png"]
    (as_json,) = json.loads(cli("search", "i", "photos/3/0003.png", "-k", "3", "--json").out)
    assert [hit["id"] for hit in as_json["results"]] == [line.split()[3] for line in lines[2:5]]
    assert as_json["query"] == "photos/3/0003.png"
    options = "photos/3/0003.png --group-by label -k 2 --facet label"
    grouped = cli("search", "i", *options.split())
    assert grouped.out.splitlines()[2].split()[2] == "3"
    assert re.fullmatch(r"label: 3 \(1\), \d \(1\)", grouped.out.splitlines()[-1])
    liked = (
        "--like 3/0003.png --dislike photos/0/0000.png --offset 1 --max-distance 9 --diversity .2"
    )
    (as_json,) = json.loads(cli("search", "i", *liked.split(), "--facet", "label", "--json").out)
    assert as_json["query"] == "3/0003.png" and len(as_json["results"]) == 10
    assert sum(entry["count"] for entry in as_json["facets"]["label"]) == 10
    (ordered,) = json.loads(cli("search", "i", *liked.split(), "--order-by=-id", "--json").out)
    ids = [hit["id"] for hit in ordered["results"]]
    assert ids == sorted((hit["id"] for hit in as_json["results"]), reverse=True)
    (tmp_path / "photos" / "bad.png").write_bytes(b"")
    for line, says in MISTAKES:
        run = cli(*line.format(bundle=bundle_path).split())
        assert (run.code, run.out) == (2, ""), (line, run.out)
        assert says in run.err and "Traceback" not in run.err, (line, run.err)
    refused = retrieval("search", "i", "photos/bad.png")  # in a process of its own
    assert (refused.code, refused.out) == (2, "")
    assert "is empty" in refused.err and "Traceback" not in refused.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "photos"]
    skipped = cli(*create, "--replace", "--skip-bad")
    assert skipped.code == 0 and "1 skipped" in skipped.out, skipped.err
    assert "skipped: " in skipped.err and "bad.png is empty" in skipped.err


def test_every_fault_of_a_csv_is_listed_at_once(cli, makers, bundle_path, tmp_path):
    makers.write_digits(tmp_path / "photos", 1)
    rows = ["path,label", "photos/0/0000.png,0", "a.png,1,2", ",x", "gone.png,3", *["x.png"] * 9]
    (tmp_path / "bad.csv").write_text("\n".join(rows))
    run = cli("index", "create", "i", tmp_path / "bad.csv", "--bundle", bundle_path)
    assert (run.code, run.out) == (2, "") and "bad.csv has 12 problems:" in run.err
    for words in ("line 3: it has 3", "line 4: 'path' is", "line 5: ", "does not exist", "2 more"):
        assert words in run.err, run.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv", "photos"]


HANGING = """
import time
import retrieval.index.adding as adding
from retrieval.bundle.bundle import Bundle
from retrieval.cli.app import main

adding._SECONDS = 0
encode, batches = Bundle.encode, []

def hang(self, inputs, **options):
    batches.append(len(inputs))
    if len(batches) > 1:
        print("encoding", flush=True)
        time.sleep(100)
    return encode(self, inputs, **options)

Bundle.encode = hang
main()
"""


def test_ctrl_c_prints_the_command_that_resumes(retrieval, makers, bundle_path, tmp_path):
    makers.write_digits(tmp_path / "my photos", 40)
    words = ["index", "create", "i", "my photos", "--bundle", str(bundle_path)]
    words += ["--batch-size", "16", "--set", "m=16", "--backend", "hnsw"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    line = [sys.executable, "-c", HANGING, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(line, env=environment, cwd=tmp_path, **pipes) as running:
        assert running.stdout.readline() == "encoding\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        told = [line for line in running.stderr.read().splitlines() if line]
    command = shlex.join(["retrieval", *words])
    kept = f"What was encoded is kept in i.partial. Go on with: {command}"
    assert told[-2:] == [kept, "Interrupted."]
    again = retrieval(*shlex.split(command)[1:])
    assert again.code == 0, again.err
    assert "Indexed 40 items" in again.out and "16 done by an interrupted run" in again.out


def test_seconds_must_be_finite_and_positive():
    settings = [setting for setting in fields(Settings) if isinstance(setting.default, float)]
    for setting in settings:
        option = f"--{setting.name.replace('_', '-')}"
        # A setting whose default is 0 takes 0 for "no limit"
        for time in (
            "nan",
            "inf",
            "-1",
            *(["0"] if setting.default and setting.name != "explore" else []),
        ):
            run = CliRunner().invoke(serve_command, ["no.index", option, time])
            assert run.exit_code == 2 and f"Invalid value for '{option}'" in run.output, run.output
    assert settings
