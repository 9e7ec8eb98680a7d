"""The commands as a user types them."""

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
from retrieval.cli.serving import serve_command
from retrieval.serving.http.settings import Settings


@pytest.fixture
def retrieval(tmp_path):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "retrieval.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return run


def test_index_search_and_their_errors(retrieval, cli, monkeypatch, makers, bundle_path, tmp_path):
    monkeypatch.chdir(tmp_path)
    makers.write_digits(tmp_path / "photos", 60)
    made = retrieval(
        "index",
        "create",
        "i",
        "photos",
        "--bundle",
        bundle_path,
        "--backend",
        "hnsw",
        "--set",
        "m=16",
    )
    assert made.returncode == 0, made.stderr
    assert re.search(
        r"Indexed 60 items in .* \(back end flat; hnsw from 20,000 items in a segment on\): i",
        made.stdout,
    )
    found = retrieval("search", "i", "photos/3/0003.png", "photos/0/0000.png", "-k", "3")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == "Nearest to photos/3/0003.png:"
    assert lines[1].split() == ["rank", "distance", "label", "id"]
    assert lines[2].split() == ["1", "0.0000", "3", "3/0003.png"]
    assert len(lines) == 11
    as_json = json.loads(cli("search", "i", "photos/3/0003.png", "-k", "3", "--json").out)
    assert [hit["id"] for hit in as_json[0]["results"]] == [line.split()[3] for line in lines[2:5]]
    assert as_json[0]["query"] == "photos/3/0003.png"
    (tmp_path / "photos" / "bad.png").write_bytes(b"")
    for arguments, says in (
        (("index", "create", "i", "photos", "--bundle", bundle_path), "i exists already"),
        (
            ("index", "create", "j", "photos", "--bundle", bundle_path),
            "1 of 61 items cannot be used",
        ),
        (("index", "create", "j", "nowhere", "--bundle", bundle_path), "nowhere does not exist"),
        (("index", "create", "j", "photos", "--bundle", "nowhere"), "nowhere is not a bundle"),
        (
            ("index", "create", "j", "photos", "--bundle", bundle_path, "--set", "m"),
            "is not KEY=VALUE",
        ),
        (
            ("index", "create", "j", "photos", "--bundle", bundle_path, "--backend", "falt"),
            "Did you mean 'flat'",
        ),
        (
            ("index", "create", "j", "photos", "--bundle", bundle_path, "--variant", "int4"),
            "no variant 'int4'",
        ),
        (("index", "create", "j", "photos", "--bundle", bundle_path, "--batch", "0"), "--batch"),
        (("search", "i", "photos/bad.png"), "is empty"),
        (("search", "i", "photos"), "is a folder; name the query images"),
        (("search", "photos", "photos/3/0003.png"), "is not an index"),
        (("serve", "photos"), "is not an index"),
        (
            ("search", "photos/3/0003.png", "i"),
            "the index comes first. Write: retrieval search i photos/3/0003.png",
        ),
        (
            ("index", "create", "j", "photos", "--bundle", "i"),
            "The bundles that embedded its items lie in i/bundles.",
        ),
        (
            ("index", "create", "j", "photos", "--bundle", bundle_path, "--max-bytes", "100B"),
            "the limit is 100",
        ),
        (
            ("index", "create", "j", "photos", "--bundle", bundle_path, "--device", "gpu"),
            "Did you mean 'cuda'?",
        ),
        (("search", "i", "photos/3/0003.png", "--device", "gpu"), "Did you mean 'cuda'?"),
    ):
        run = cli(*arguments)
        assert run.code == 2, (arguments, run.out)
        assert says in run.err, (arguments, run.err)
        assert "Traceback" not in run.err
        assert run.out == ""
    refused = retrieval(
        "search", "i", "photos/bad.png"
    )  # one of them as a user gets it, from a process
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is empty" in refused.stderr and "Traceback" not in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "photos"]
    skipped = cli(
        "index", "create", "i", "photos", "--bundle", bundle_path, "--replace", "--skip-bad"
    )
    assert skipped.code == 0, skipped.err
    assert "1 skipped" in skipped.out
    assert "skipped: " in skipped.err
    assert "bad.png is empty" in skipped.err


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
import retrieval.serving.index.adding as adding
from retrieval.serving.bundle import Bundle
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


def test_ctrl_c_prints_the_whole_command_to_go_on_with(retrieval, makers, bundle_path, tmp_path):
    makers.write_digits(tmp_path / "my photos", 40)
    words = [
        "index",
        "create",
        "i",
        "my photos",
        "--bundle",
        str(bundle_path),
        "--batch",
        "16",
        "--set",
        "m=16",
    ]
    words += ["--backend", "hnsw"]
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    ) as running:
        assert running.stdout.readline() == "encoding\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        told = [line for line in running.stderr.read().splitlines() if line]
    command = shlex.join(["retrieval", *words])
    assert told[-2:] == [
        f"What was encoded is kept in i.partial. Go on with: {command}",
        "Interrupted.",
    ]
    again = retrieval(*shlex.split(command)[1:])
    assert again.returncode == 0, again.stderr
    assert "Indexed 40 items" in again.stdout and "16 done by an interrupted run" in again.stdout


def test_a_time_is_a_number_within_bounds():
    times = [each for each in fields(Settings) if isinstance(each.default, float)]
    for each in times:
        option = f"--{each.name.replace('_', '-')}"
        for time in ("nan", "inf", "-1", *(["0"] if each.default else [])):  # 0: no limit
            run = CliRunner().invoke(serve_command, ["no.index", option, time])
            assert run.exit_code == 2 and f"Invalid value for '{option}'" in run.output, run.output
    assert times
