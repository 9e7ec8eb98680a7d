"""Bundles on a hub: pushed, opened by address in every place, and refused if they are hostile."""

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import time

import makers
import numpy as np
import pytest
import retrieval
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import FILE
from retrieval.errors import BundleError, MissingDependency, RetrievalError, ServerError

huggingface_hub = pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
yaml = pytest.importorskip("yaml")

from hub_server import TOKEN, running_hub  # noqa: E402

# huggingface_hub uploads files by a parameter that its HTTP client deprecates
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPOSITORY = "someone/digits"
ADDRESS = f"hf://{REPOSITORY}"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine, in which this process and its children may write."""
    with running_hub() as hub:
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "RETRIEVAL_CACHE": str(tmp_path / "cache"),
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        # the library reads its settings when it is imported
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        hub.cache = tmp_path / "cache" / "hub"
        yield hub


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory):
    return makers.make_bundle(tmp_path_factory.mktemp("bundle") / "bundle", variant=True)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def published(hub, files):
    """Put files into the repository as one commit, as somebody else's program would."""
    from hub_server import Repository

    return hub.repositories.setdefault(REPOSITORY, Repository()).commit(files)


def command(*words, **environment):
    """Run the command line in a new process, which reads HF_ENDPOINT."""
    line = [sys.executable, "-m", "retrieval.cli", *map(str, words)]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def test_a_bundle_is_pushed_and_indexed_by_its_address(hub, bundle_path, tmp_path):
    pushed = command("push-hub", bundle_path, REPOSITORY, "--licence", "apache-2.0")
    assert pushed.returncode == 0, pushed.stderr
    address = re.search(rf"{ADDRESS}@[0-9a-f]{{40}}", pushed.stdout)[0]
    assert any(request.startswith("PUT /lfs/") for request in hub.requests)
    makers.write_digits(tmp_path / "photos", 30)
    for option, index in (("--model", "a.index"), ("--bundle", "b.index")):
        made = command("index", "create", tmp_path / index, tmp_path / "photos", option, address)
        assert made.returncode == 0, made.stderr
        with retrieval.Index.open(tmp_path / index) as opened:
            assert opened.bundle.sha256 == Bundle.open(bundle_path).sha256 and len(opened) == 30


def test_the_card_says_what_the_manifest_says(hub, bundle_path):
    from retrieval_hub.push import push_bundle

    bundle = Bundle.open(bundle_path)
    push_bundle(bundle, REPOSITORY, licence="mit")
    repository = hub.repositories[REPOSITORY]
    card = repository.commits[repository.at("main")]["README.md"].decode()
    front = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.S)[1])
    assert front["license"] == "mit" and front["pipeline_tag"] == "image-feature-extraction"
    assert front["embedding"]["bundle"] == bundle.sha256
    assert front["embedding"]["vector"] == bundle.manifest.vector
    assert front["embedding"]["verified"] == bundle.manifest.verified.model_dump()
    assert huggingface_hub.ModelCard(card).data.to_dict()["embedding"] == front["embedding"]
    assert bundle.sha256 in card and "| fp16 | cosine to the encoder 1.0000" in card
    # what the card tells people to run runs
    code = re.search(r"```python\n(.*?)```", card, re.S)[1]
    assert f'retrieval.load("{ADDRESS}?bundle={bundle.sha256}")' in code
    assert retrieval.load(f"{ADDRESS}?bundle={bundle.sha256}").bundle.sha256 == bundle.sha256
    # an own card stays
    published(hub, {**repository.commits[repository.at("main")], "README.md": b"mine"})
    push_bundle(bundle, REPOSITORY)
    assert repository.commits[repository.at("main")]["README.md"] == b"mine"


def test_a_pushed_bundle_is_the_same_and_is_downloaded_once(hub, bundle_path):
    from retrieval_hub.push import push_bundle

    bundle = Bundle.open(bundle_path)
    address = push_bundle(bundle, REPOSITORY)
    encoder = retrieval.load(address)
    pixels = makers.digits()[0][:5, None]
    assert np.array_equal(encoder.bundle.encode(pixels).vector, bundle.encode(pixels).vector)
    assert encoder.bundle.sha256 == bundle.sha256
    assert retrieval.load(address, variant="fp16").bundle.variant == "fp16"
    assert files_of(encoder.path) == files_of(bundle_path)
    hub.requests.clear()
    retrieval.load(address)
    assert hub.requests == []  # a commit cannot change
    retrieval.load(ADDRESS)
    assert len(hub.requests) == 1  # which commit it is now
    # a new commit is another bundle; the old one stays at its address
    second = makers.make_bundle(bundle_path.parent / f"second{id(hub)}", seed=3)
    push_bundle(Bundle.open(second), REPOSITORY)
    assert retrieval.load(ADDRESS).bundle.sha256 == Bundle.open(second).sha256
    assert retrieval.load(address).bundle.sha256 == bundle.sha256
    with pytest.raises(BundleError, match="another than the address names"):
        retrieval.load(f"{ADDRESS}?bundle={bundle.sha256}")


def test_a_hub_bundle_is_measured_beside_others(hub, bundle_path):
    from retrieval.plugin import ArrayDataset

    from retrieval_hub.download import HubBundle
    from retrieval_hub.push import push_bundle

    bundle = Bundle.open(bundle_path)
    push_bundle(bundle, REPOSITORY)
    images, labels = makers.digits()
    dataset = ArrayDataset(images[:300], [str(label) for label in labels[:300]])
    rows = np.arange(290)
    vectors = HubBundle(ADDRESS)(dataset, rows)
    assert np.allclose(vectors, bundle.encode(images[:290, None]).vector, atol=1e-6)


def reseal(files, change):
    """Change the manifest as a hostile program would: with a right checksum."""
    from retrieval.bundle.manifest import checksum_of

    content = json.loads(files[FILE])
    change(content)
    content["checksum"] = checksum_of(content)
    return {**files, FILE: json.dumps(content).encode()}


def rename_encoder(name):
    def change(content):
        content["files"][name] = content["files"].pop("encoder.onnx")
        content["encoder"] = name

    return change


def grow(content):
    content["files"]["encoder.onnx"]["bytes"] = 1 << 50


HOSTILE = {
    "an altered graph": (
        lambda files: {**files, "encoder.onnx": files["encoder.onnx"][:-1] + b"\x00"},
        "was altered",
    ),
    "an altered manifest": (
        lambda files: {**files, FILE: files[FILE].replace(b"digits", b"digitz")},
        "was altered: its checksum differs",
    ),
    "a path outside": (
        lambda files: {
            **reseal(files, rename_encoder("../../evil.onnx")),
            "../../evil.onnx": files["encoder.onnx"],
        },
        "is not the plain name of a file",
    ),
    "an absolute path": (
        lambda files: {
            **reseal(files, rename_encoder("/tmp/evil.onnx")),
            "/tmp/evil.onnx": files["encoder.onnx"],
        },
        "is not the plain name of a file",
    ),
    # git keeps a link as a blob with the path that it leads to, which the hub serves as text
    "a link": (
        lambda files: {**files, "encoder.onnx": b"/etc/passwd"},
        "does not describe its files",
    ),
    "a pickle": (
        lambda files: {
            **reseal(files, lambda content: content["files"].pop("encoder.fp16.onnx")),
            "encoder.onnx": pickle.dumps(print),
        },
        "no SHA-256 for|does not describe",
    ),
    "a missing file": (
        lambda files: {name: b for name, b in files.items() if name != "encoder.onnx"},
        "encoder.onnx .missing",
    ),
    "no manifest": (lambda files: {"pytorch_model.bin": pickle.dumps(print)}, "It is not a bundle"),
    "a manifest that is too large": (
        lambda files: {**files, FILE: files[FILE] + b" " * 5_000_000},
        "larger than the 4,000,000 bytes",
    ),
    "nonsense": (lambda files: {**files, FILE: b"\xff\x00"}, "cannot be used"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_snapshot_is_refused_and_leaves_nothing(what, hub, bundle_path):
    change, says = HOSTILE[what]
    published(hub, change(files_of(bundle_path)))
    with pytest.raises(BundleError, match=says):
        retrieval.load(ADDRESS)
    left = [path for path in hub.cache.rglob("*") if path.is_file() and ".lock" not in path.name]
    assert left == []


def test_only_the_files_of_the_manifest_are_downloaded(hub, bundle_path):
    files = files_of(bundle_path)
    extra = {"model.pkl": pickle.dumps(print), "sub/dir/x.py": b"import os", "README.md": b"# hi"}
    published(hub, {**files, **extra})
    encoder = retrieval.load(ADDRESS)
    assert files_of(encoder.path) == files
    asked = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert asked == set(files)


def test_a_file_that_claims_more_than_the_disk_has_is_refused_before_it_is_downloaded(
    hub, bundle_path
):
    published(hub, reseal(files_of(bundle_path), grow))
    hub.claims["encoder.onnx"] = 1 << 50
    with pytest.raises(BundleError, match=r"has .* left"):
        retrieval.load(ADDRESS)
    assert not any("encoder.onnx" in request for request in hub.requests)


def test_a_download_that_never_ends_is_stopped(hub, bundle_path):
    files = files_of(bundle_path)
    published(hub, files)
    hub.endless.add("encoder.onnx")
    size = len(files["encoder.onnx"])
    with pytest.raises(BundleError, match=f"larger than the {size:,} bytes"):
        retrieval.load(ADDRESS)
    assert not any(path.is_file() for path in hub.cache.rglob("*.onnx*"))


def test_an_interrupted_download_leaves_no_bundle_and_is_resumed(hub, bundle_path, monkeypatch):
    oid = published(hub, files_of(bundle_path))
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the library's attempts
    hub.break_after = 100
    with pytest.raises((ServerError, BundleError)):
        retrieval.load(ADDRESS)
    folder = hub.cache / REPOSITORY.replace("/", "--")
    assert not (folder / oid).exists()
    assert not any(path.suffix == ".onnx" for path in folder.rglob("*"))
    hub.break_after = None
    assert retrieval.load(ADDRESS).path == folder / oid
    assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == [oid]


def test_a_killed_download_leaves_no_bundle(hub, bundle_path):
    size = 1 << 30  # so that the child is still downloading when it is killed
    record = {"sha256": hashlib.sha256(b"").hexdigest(), "bytes": size}
    files = reseal(
        files_of(bundle_path),
        lambda content: content["files"].update({"encoder.onnx": record}),
    )
    hub.endless.add("encoder.onnx")
    hub.claims["encoder.onnx"] = size
    oid = published(hub, files)
    code = f"import retrieval; retrieval.load({ADDRESS!r})"
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    folder = hub.cache / REPOSITORY.replace("/", "--")
    while not list(folder.rglob("*.incomplete")):
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert not (folder / oid).exists()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("hf://someone", "not the address of a bundle on a hub"),
        ("hf://someone/../x", "not the address of a bundle on a hub"),
        ("hf://someone/digits@../x", "not the address of a bundle on a hub"),
        ("hf://someone/digits?bundle=12", "not the address of a bundle on a hub"),
        ("hf://someone/nothing", "does not exist, or you may not read"),
        ("hf://someone/digits@v2", "there is no such revision"),
    ],
)
def test_wrong_addresses_are_sentences(address, says, hub, bundle_path):
    published(hub, files_of(bundle_path))
    with pytest.raises(BundleError, match=says):
        retrieval.load(address)


def test_the_command_says_what_is_wrong(hub, bundle_path, tmp_path):
    for words, environment, says in (
        ((bundle_path, "digits"), {}, "is not the name of a repository"),
        ((bundle_path, REPOSITORY), {"HF_TOKEN": "hf_wrong"}, "HF_TOKEN"),
        ((tmp_path, REPOSITORY), {}, "is not a bundle"),
        ((bundle_path, REPOSITORY), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ):
        done = command("push-hub", *words, **environment)
        assert done.returncode == 2 and says in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert not hub.repositories


def test_without_the_library_the_extra_is_named(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"embedding-retrieval\[hub\]"):
        retrieval.load(ADDRESS)


def test_addresses_of_other_kinds_are_refused_as_before(hub):
    for source in ("ftp://x/y", "http://127.0.0.1:9", "s3://bucket/bundle"):
        with pytest.raises(RetrievalError, match="neither a run, nor a bundle"):
            retrieval.load(source)
        with pytest.raises(BundleError, match="is not a bundle"):
            Bundle.open(source)
