"""The operator's page names exactly the server's metrics, stages and checks."""

import json
import re
import shutil
import urllib.request

import makers
import pytest
from prometheus_client.parser import text_string_to_metric_families
from retrieval.base.timing import STAGES
from retrieval.index.index import Index, create_index


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    part = text.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in part.splitlines()
        if line.startswith("| `")
    ]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_page_names_every_metric_stage_and_check(reader, root, blocks, capfd):
    query, *_ = makers.write_digits(reader.folder / "photos", 20)
    place = reader.folder / "photos.index"
    create_index(place, makers.make_bundle(reader.folder / "bundle"), progress=False)
    with Index.open(place, threads=1) as index:
        index.add(reader.folder / "photos", progress=False)
    page = root / "docs" / "operator.md"
    text = page.read_text(encoding="utf-8")
    reader._line(f"retrieval serve {place} --log-format json", "here")
    reader._line(f"curl -F image=@{query} -F k=1 http://127.0.0.1:8000/v1/search", "here")
    with urllib.request.urlopen(f"http://127.0.0.1:{reader.port}/metrics") as answer:
        parsed = text_string_to_metric_families(answer.read().decode())
    families = {
        family.name: family
        for family in parsed
        if family.name.startswith("retrieval_") and not family.name.endswith("_created")
    }
    # Every metric has a row with its labels.
    shown: dict[str, set[str]] = {}
    for names, labels, _ in rows(text, "## Metrics"):
        first, *more = re.findall(r"`(\w+)`", names)
        for name in (first, *more):
            shown[name.removesuffix("_total")] = set(re.findall(r"`(\w+)`", labels))
    assert set(shown) == set(families)
    for name, family in families.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= shown[name] and (labels == shown[name] or not family.samples), name
    assert [stage for (stage, *_) in rows(text, "### Stages")] == [f"`{stage}`" for stage in STAGES]
    checks = [check.strip("`") for (check, _) in rows(text, "## Health")]
    with urllib.request.urlopen(f"http://127.0.0.1:{reader.port}/readyz") as answer:
        assert list(json.loads(answer.read())["checks"]) == checks

    # A line of the log has the keys and types that the page shows.
    reader.close()
    err = capfd.readouterr().err.splitlines()
    lines = [json.loads(line) for line in err if line.startswith("{")]
    (line,) = [line for line in lines if line["route"] == "/v1/search"]
    (shown_log,) = [b.body for b in blocks(page) if b.language == "json" and "request_id" in b.body]
    log = json.loads(shown_log)
    assert set(log) == set(line) and set(log["stages"]) == set(line["stages"])
    assert all(type(value) is type(line[name]) for name, value in log.items())


def test_every_deployed_file_is_named(root):
    text = (root / "docs" / "operator.md").read_text(encoding="utf-8")
    services = [path.name for path in (root / "deploy").glob("*.service")]
    assert all(f"`{name}`" in text for name in [*services, "Dockerfile", "compose.yaml"])
