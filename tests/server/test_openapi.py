"""The OpenAPI document agrees with the routes, responses and roles of a real server."""

import json
import re
import warnings
from base64 import b64encode

import pytest
from retrieval.index.index import Index

from retrieval_server.keys import add_key, new_key
from retrieval_server.openapi import OPERATIONS, document
from retrieval_server.routes import Routes
from retrieval_server.settings import Settings

WIDTH = 16
DOCUMENT = document(Routes)


def test_the_document_describes_exactly_the_routes():
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


def test_path_parameters_and_references_are_declared():
    text = json.dumps(DOCUMENT)
    for path, methods in DOCUMENT["paths"].items():
        parameters = [entry for operation in methods.values() for entry in operation["parameters"]]
        in_path = {entry["name"] for entry in parameters if entry["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path))
    for reference in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert reference in DOCUMENT["components"]["schemas"]


def valid(schema: dict, content: object) -> bool:
    """Return whether JSON matches a schema of the document."""
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    whole = {**schema, "components": DOCUMENT["components"]}
    return jsonschema_rs.is_valid(whole, content)


def test_responses_match_the_document(served, living, photos):
    with Index.open(living, threads=1) as index:
        index.calibrate(progress=False)
    options = ("--open", "admin", "--snapshots", str(living.parent), "--feedback")
    server = served(living, *options)
    image = next(photos.rglob("*.png")).read_bytes()
    vector, seen = [0.5] * WIDTH, set()

    def ask(path, method="GET", template=None, **more):
        answer = server.client.request(method, path, **more)
        template = template or path.partition("?")[0]
        operation = DOCUMENT["paths"][template][method.lower()]
        seen.add(operation["operationId"].removesuffix("Of"))
        responses = operation["responses"]
        described = responses.get(str(answer.status_code)) or responses["4XX"]
        kind = answer.headers["content-type"]
        assert kind in described["content"], (path, kind, answer.text[:300])
        if "json" in kind:
            assert valid(described["content"][kind]["schema"], answer.json()), answer.text
        return answer

    for prefix, pattern in (("/v1", "/v1"), ("/v1/indexes/i", "/v1/indexes/{index}")):

        def own(path, method="GET", end=None, prefix=prefix, pattern=pattern, status=200, **more):
            answer = ask(prefix + path, method, pattern + (end or path.partition("?")[0]), **more)
            assert answer.status_code == status, (path, answer.text)
            return answer

        own("/items/a%2Fb", "PUT", "/items/{id}", files={"image": image}, data={"label": "x"})
        own("/item?id=c", "PUT", json={"vector": vector, "metadata": {"n": 1}})
        own("/item?id=c", "PATCH", json={"metadata": {"n": 2}})
        own("/items/a%2Fb", "PATCH", "/items/{id}", json={"label": "y"})
        for body in ({"vector": vector, "explain": True}, {"id": "c", "fields": []}):
            own("/search", "POST", json=body)
        own("/search?explain=true", "POST", content=image, headers={"Content-Type": "image/png"})
        asks = {"group_by": "label", "facets": ["label"], "scores": True, "like": ["c"]}
        own("/search", "POST", json=asks)
        own("/search", "POST", files=[("image", image), ("like", image)], data={"dislike": "c"})
        own("/search", "POST", json={}, status=400)
        own("/identify", "POST", json={"vector": vector, "far": 0.5})
        own("/identify", "POST", files=[("image", image)] * 2, status=422)
        own("/identify?far=0.5", "POST", content=image, headers={"Content-Type": "image/png"})
        own("/search/batch", "POST", json={"queries": [{"id": "c"}], "explain": True})
        own("/encode", "POST", files=[("image", image)] * 2)
        own("/encode", "POST", json={"text": "a red mug"}, status=422)
        own("/search", "POST", json={"text": "a red mug"}, status=422)
        data_url = f"data:image/png;base64,{b64encode(image).decode()}"
        for form in ("float", "base64"):
            body = {"input": [data_url], "model": "i", "encoding_format": form}
            own("/embeddings", "POST", json=body)
        own("/embeddings", "POST", json={"input": "http://x/y.png", "model": "i"}, status=400)
        answer = own("/search", "POST", json={"vector": vector, "k": 2}).json()
        hits = [hit["id"] for hit in answer["results"]]
        body = {"search_id": answer["search_id"], "liked": hits[:1], "clicked": hits[1:]}
        own("/feedback", "POST", json=body)
        own("/feedback", "POST", json={**body, "search_id": "-" * 22}, status=404)
        own("/index")
        own("/items?limit=3&order=newest")
        own("/items", "POST", json={"items": [{"id": "d", "vector": vector}]})
        own("/items", "PATCH", json={"filter": "n = 2", "label": "z", "metadata": None})
        own("/items/a%2Fb?vector=true", end="/items/{id}")
        own("/items/a%2Fb/image", end="/items/{id}/image")
        own("/items/a%2Fb/thumbnail", end="/items/{id}/thumbnail")
        own("/item?id=a/b&vector=true")
        own("/item/image?id=a/b")
        own("/item/thumbnail?id=a/b")
        own("/snapshots", "POST", status=201)
        own("/item?id=c", "DELETE")
        own("/items/a%2Fb", "DELETE", "/items/{id}")
        own("/items/a%2Fb", "DELETE", "/items/{id}", status=404)
        own("/delete", "POST", json={"filter": "id = 'd'"})
    for path in ("/v1/indexes", "/v1/openapi.json"):
        assert ask(path).status_code == 200
    assert seen == {operation.id for operation in OPERATIONS}
    for operation in OPERATIONS:  # an unknown parameter is refused, and the known ones are named
        if operation.method == "get" and operation.query:
            path = operation.path.replace("{id}", "x")
            answer = server.client.get(f"/v1{path}?unknown=1")
            assert answer.status_code == 400 and "no parameter 'unknown'" in answer.json()["detail"]
            assert all(name in answer.json()["detail"] for name in operation.query if name != "id")


def test_the_document_names_the_role_that_each_operation_needs(served, living):
    keys, sent = living.parent / "keys.jsonl", {}
    for role in ("read", "feedback", "write", "admin"):
        sent[role], kept = new_key(role, role)
        add_key(keys, kept)
    client = served(living, "--keys", str(keys), "--feedback").client
    roles = list(sent)
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            address = path.replace("{index}", "i").replace("{id}", "nobody")

            def ask(role, method=method, address=address):
                headers = {} if role is None else {"Authorization": f"Bearer {sent[role]}"}
                return client.request(method, address, headers=headers)

            if not operation["security"]:
                assert ask(None).status_code == 200 and address.endswith("openapi.json")
                continue
            ((role,),) = [needed["key"] for needed in operation["security"] if needed]
            assert ask(None).status_code == 401, operation["operationId"]
            for lower in roles[: roles.index(role)]:
                assert ask(lower).status_code == 403, operation["operationId"]
            allowed = ask(role)
            assert "role" not in allowed.text or allowed.status_code == 200, allowed.text
            assert allowed.status_code != 401
    assert DOCUMENT["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_responses_to_requests_of_schemathesis_match_the_document(served, living):
    schemathesis = pytest.importorskip("schemathesis")
    requests = pytest.importorskip("requests")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi import checks

    server = served(living, "--open", "admin", "--feedback")
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
