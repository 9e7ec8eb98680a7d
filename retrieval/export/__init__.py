"""From a run to a bundle: torch to ONNX, compared with torch."""
