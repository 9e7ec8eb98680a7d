"""Export a model as a bundle: ONNX graphs that are compared with torch."""
