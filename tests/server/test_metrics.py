"""The metrics of a server under load, read by Prometheus's parser; no client can add series."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import wire
from prometheus_client.parser import text_string_to_metric_families
from retrieval.base.timing import STAGES
from retrieval.index.index import Index

from retrieval_server.app import Application


def scrape(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Return all samples: by name, then by the values of their labels."""
    answer = wire.ask(port, wire.get("/metrics"))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation and family.name.startswith(("retrieval_", "process_"))
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return samples


def test_under_load_every_request_is_counted(served, index_path, photos):
    port = served(index_path, "--workers", "2", "--images", str(photos)).port
    image = wire.post(wire.form((photos / "3" / "0003.png").read_bytes(), "3"), wire.FORM)
    before = scrape(port)["retrieval_requests_total"]
    pictures = [wire.get(f"/v1/items/{id}/image") for id in ("3%2F0003.png", "x")]
    requests = [image, wire.vector(), *pictures, wire.vector(width=3)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda request: wire.ask(port, request), requests * 20))
        during = [threads.submit(scrape, port) for _ in range(5)]
        assert all(entry.result() for entry in during)
    now = scrape(port)
    counts = now["retrieval_requests_total"]
    search, image_of, metrics = "/v1/search", "/v1/items/{id}/image", ("GET", "/metrics", "200")
    assert [answer.status for answer in answers] == [200, 200, 200, 404, 422] * 20
    assert counts["POST", search, "200"] == 40 and counts["POST", search, "422"] == 20
    assert counts["GET", image_of, "200"] == counts["GET", image_of, "404"] == 20
    assert counts[metrics] - before.get(metrics, 0) == 6
    assert now["retrieval_refused_total"]["404",] == now["retrieval_refused_total"]["422",] == 20
    # Each request passed its stages once
    stages, seconds = now["retrieval_stage_seconds_count"], now["retrieval_stage_seconds_sum"]
    assert set(stages) == {(stage,) for stage in STAGES}
    assert stages["read",] == 60 and stages["decode",] == stages["encode",] == 20
    assert stages["search",] == 40  # a vector of another width is refused before it is searched
    assert stages["items",] == 40 and stages["write",] == 0
    assert now["retrieval_encode_batch_count"][()] == now["retrieval_encode_batch_sum"][()] == 20
    parts = sum(seconds[stage,] for stage in ("decode", "encode", "search", "items"))
    assert 0 < parts < now["retrieval_request_seconds_sum"][search,]
    # The state of the server
    queues = {("searches",): 0, ("images",): 0, ("pictures",): 0, ("changes",): 0}
    assert now["retrieval_queue_length"] == queues
    assert now["retrieval_index_items"][()] == 200
    assert now["retrieval_decode_processes"][()] >= 1
    assert now["process_resident_memory_bytes"][()] > 20e6
    assert now["process_cpu_seconds_total"][()] > 0


def test_no_client_multiplies_the_series(served, index_path, photos):
    port, image = served(index_path, "--images", str(photos)).port, "/v1/items/3%2F0003.png/image"
    scrape(port)
    once = (wire.ask(port, wire.get("/nothing0")), wire.ask(port, wire.get(image)))
    assert [answer.status for answer in once] == [404, 200]
    wire.ask(port, b"PURGE / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wire.ask(port, b"nonsense\r\n\r\n")
    before = scrape(port)
    for number in range(30):
        method = (b"PROPFIND", b"LOCK", b"MKCOL")[number % 3]
        wire.ask(port, wire.get(f"/nothing{number}"))
        wire.ask(port, wire.get(image, f"X-Request-Id: {number}"))
        wire.ask(port, wire.get("/").replace(b"GET", method, 1))
        wire.ask(port, b"nonsense\r\n\r\n")
    after = scrape(port)
    series = [{name: set(values) for name, values in now.items()} for now in (before, after)]
    assert series[0] == series[1]
    assert after["retrieval_requests_total"]["GET", "other", "404"] == 31


def test_an_answer_that_says_not_ready_is_no_refused_request(index_path):
    async def statuses(app: Application) -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            ready = await client.get("/readyz")
            put = await client.put("/v1/items/a", json={})
        return [ready.status_code, put.status_code]

    with Index.open(index_path, threads=1) as index:
        app = Application({"one": index})  # without its lifespan, no check makes it ready
        assert asyncio.run(statuses(app)) == [503, 403]
        text = app._metrics.text().decode()
        app.workers.close()
    assert 'retrieval_requests_total{method="GET",route="/readyz",status="503"} 1.0' in text
    put = 'retrieval_requests_total{method="PUT",route="/v1/items/{id}",status="403"} 1.0'
    assert put in text
    assert 'retrieval_refused_total{reason="403"} 1.0' in text
    assert 'retrieval_refused_total{reason="503"}' not in text


def test_changes_have_their_stages(empty, served, photos):
    server = served(empty, "--open", "write")
    client = server.client
    picture = {"image": (photos / "3" / "0003.png").read_bytes()}
    batch = {"items": [{"id": "b", "vector": [0.5] * 16}, {"id": "c", "vector": [0.25] * 16}]}
    assert client.put("/v1/items/a", files=picture).status_code == 200
    assert client.patch("/v1/items/a", json={"label": "three"}).status_code == 200
    for _ in range(2):
        assert client.post("/v1/items", json=batch).status_code == 200
    assert client.put("/v1/items/d", json={"vector": [0.5]}).status_code == 422
    assert client.delete("/v1/items/b").json() == {"deleted": 1}
    now = scrape(server.port)
    stages = now["retrieval_stage_seconds_count"]
    assert stages["write",] == 5 and now["retrieval_stage_seconds_sum"]["write",] > 0
    assert stages["decode",] == stages["encode",] == now["retrieval_encode_batch_sum"][()] == 1
    assert stages["read",] == 5
