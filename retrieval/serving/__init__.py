"""What runs without torch: images, bundles, indexes and the search service."""
