"""The parts that run without torch: images, bundles, indexes and the search service."""
