"""Bundles: exported models, which run in ONNX Runtime."""
