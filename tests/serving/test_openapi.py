"""The OpenAPI document: it says what the code does, and answers are what it says."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
from retrieval.serving.http.keys import add_key, new_key
from retrieval.serving.http.openapi import OPERATIONS, document
from retrieval.serving.http.routes import Routes
from retrieval.serving.http.settings import Settings

DOCUMENT = document(Routes)


@pytest.fixture
def living(index_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_path, tmp_path / "i"))


def test_every_route_is_described_and_every_description_is_a_route():
    routes = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in Routes({}, Settings()).all()
        for method in route.methods - {"HEAD"}
    }
    assert routes == {
        (path, method) for path, methods in DOCUMENT["paths"].items() for method in methods
    }
    paths = DOCUMENT["paths"].values()
    names = [operation["operationId"] for methods in paths for operation in methods.values()]
    count = sum(1 + operation.of_index for operation in OPERATIONS)
    assert len(names) == len(set(names)) == count


def test_the_document_is_openapi():
    text = json.dumps(DOCUMENT)
    for path, methods in DOCUMENT["paths"].items():
        parameters = [entry for operation in methods.values() for entry in operation["parameters"]]
        in_path = {entry["name"] for entry in parameters if entry["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path))
    for reference in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert reference in DOCUMENT["components"]["schemas"]


def test_the_document_names_the_role_that_each_operation_takes(served, living):
    """A key of that role comes further than the key; none, and one of the role below, do not."""
    keys = living.parent / "keys.jsonl"
    sent = {}
    for role in ("read", "write", "admin"):
        sent[role], kept = new_key(role, role)
        add_key(keys, kept)
    client = served(living, "--keys", str(keys)).client
    roles = list(sent)
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            address = path.replace("{index}", "i").replace("{id}", "nobody")

            def status(role, method=method, address=address):
                headers = {} if role is None else {"Authorization": f"Bearer {sent[role]}"}
                return client.request(method, address, headers=headers).status_code

            if not operation["security"]:
                assert status(None) == 200 and address.endswith("openapi.json")
                continue
            ((role,),) = [needed["key"] for needed in operation["security"] if needed]
            assert status(None) == 401, operation["operationId"]
            lower = roles[: roles.index(role)]
            assert [status(role) for role in lower] == [403] * len(lower), operation["operationId"]
            allowed = client.request(
                method, address, headers={"Authorization": f"Bearer {sent[role]}"}
            )
            assert "role" not in allowed.text or allowed.status_code == 200, (
                operation["operationId"],
                allowed.text,
            )
            assert allowed.status_code != 401
    assert DOCUMENT["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_whatever_schemathesis_sends_is_answered_as_the_document_says(served, living):
    """Bounded: a few requests an operation, right and wrong ones."""
    schemathesis = pytest.importorskip("schemathesis")
    requests = pytest.importorskip("requests")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi import checks

    server = served(living, "--open", "admin")
    promises = (
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    )
    with warnings.catch_warnings(), requests.Session() as session:
        warnings.simplefilter("ignore")
        schema = schemathesis.openapi.from_dict(DOCUMENT)
        count = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path.startswith("/v1/indexes/"):
                continue
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(
                    max_examples=3,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                    phases=[Phase.generate],
                )
                def test(case):
                    nonlocal count
                    count += 1
                    case.call_and_validate(
                        base_url=server.url, checks=list(promises), session=session
                    )

                try:
                    test()
                except Exception as fault:
                    if type(fault).__name__ not in ("Unsatisfiable", "SkipTest", "Skipped"):
                        raise
    assert count > 60
    assert server.client.get("/livez").status_code == 200
