"""The systems that `store.py` compares, by name."""

from __future__ import annotations

from store_local import Local, LocalHNSW
from store_peers import Chroma, Faiss, FaissHNSW, Lance, LanceHNSW, Milvus, MilvusHNSW, Qdrant
from store_verbs import System

SYSTEMS: dict[str, type[System]] = {
    "local flat": Local,
    "local HNSW": LocalHNSW,
    "qdrant-client": Qdrant,
    "milvus-lite": Milvus,
    "milvus-lite HNSW": MilvusHNSW,
    "lancedb": Lance,
    "lancedb HNSW": LanceHNSW,
    "chromadb": Chroma,
    "faiss flat": Faiss,
    "faiss HNSW": FaissHNSW,
}
"""Those with a `base` come behind it."""
