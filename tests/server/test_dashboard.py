"""The dashboard of `deploy/` shows all metrics of a server, and no others."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from retrieval.base.timing import STAGES, Trail
from retrieval.index.index import Index, create_index

from retrieval_server.app import Application

DEPLOY = Path(__file__).parents[2] / "deploy"


def labels_by_sample(path: Path) -> dict[str, set[str]]:
    """Return the labels of each sample that a server of two indexes exports, by its name."""
    with Index.open(path, threads=1) as index:
        app = Application({"one": index, "other": index})
        trail = Trail()
        for name in STAGES:
            trail.note(name, 0.5)
            trail.batches.append((name, 1))
        app._metrics.answered(trail, "POST", "/v1/search", 503, 1.0)
        text = app._metrics.text().decode()
        app.workers.close()
    labels: dict[str, set[str]] = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return {name: own for name, own in labels.items() if not name.endswith("_created")}


def family(name: str) -> str:
    """Return a sample's metric: `…_seconds` of `…_seconds_bucket`."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.fixture
def labels_by_name(bundle_path, photos, tmp_path):
    """The labels of each sample of a server's metrics."""
    create_index(tmp_path / "i", bundle_path, progress=False)
    with Index.open(tmp_path / "i", threads=1) as index:
        index.add([photos / "1"], progress=False)
    return labels_by_sample(tmp_path / "i")


def check_labels(text: str, known: set[str]) -> str:
    """Check that an expression has only known labels; return its conditions."""
    inside = " ".join(re.findall(r"\{([^}]*)\}", text))
    by = " ".join(re.findall(r"by \(([^)]*)\)", text))
    assert set(re.findall(r'(\w+)[!=]~?"', inside)) | set(re.findall(r"\w+", by)) <= known, text
    return inside


def test_each_alert_names_existing_metrics_and_labels(labels_by_name):
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    known = set().union(*labels_by_name.values()) | {"job"}
    assert len(group["rules"]) >= 8
    for rule in group["rules"]:
        names = set(re.findall(r"\b(?:retrieval|process)_\w+", rule["expr"]))
        assert names or rule["expr"].startswith("up{"), rule
        assert names <= set(labels_by_name), "no metric has this name"
        check_labels(rule["expr"], known)
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["annotations"]["summary"].endswith(".")


def test_the_dashboard_shows_every_metric_and_no_other(labels_by_name):
    dashboard = json.loads((DEPLOY / "grafana" / "retrieval.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) >= 20
    shown = set(re.findall(r"\b(?:retrieval|process)_\w+", " ".join(expressions)))
    assert not shown - set(labels_by_name), "no metric has this name"
    ours = {family(name) for name in labels_by_name if name.startswith("retrieval_")}
    assert {family(name) for name in shown if name.startswith("retrieval_")} == ours
    known = set().union(*labels_by_name.values()) | {"job"}
    for text in expressions:
        inside = check_labels(text, known)
        # A user can choose one of several indexes.
        assert ('index=~"$index"' in inside) == ("retrieval_index_" in text)
    choices = {entry["name"]: entry for entry in dashboard["templating"]["list"]}
    # The metrics of a server of one index lack this label, and "All" must match them.
    assert choices["index"]["includeAll"] and choices["index"]["allValue"] == ".*"
