"""A server of ours is an endpoint whose vectors another installation measures and indexes."""

import numpy as np
from makers import digits
from retrieval.bundle.bundle import Bundle
from retrieval.host.plugins import load_plugins
from retrieval.plugin import ArrayDataset
from retrieval.run.encoders import encoder_at


def test_the_vectors_of_a_server_are_those_of_its_bundle(shared, index_path, bundle_path):
    images, labels = digits()
    data = ArrayDataset(images[:20], list(map(str, labels[:20])))
    url = shared(index_path).url
    encoder = encoder_at(load_plugins(), f"{url}/v1/embeddings?model={index_path.stem}")
    bundle = Bundle.open(bundle_path, device="cpu")
    vectors = bundle.encode(np.stack([bundle.preprocess(image) for image in images[:20]])).vector
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.allclose(encoder(data, np.arange(20)), expected, atol=1e-6)
