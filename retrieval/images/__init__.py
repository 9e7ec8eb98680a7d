"""Images: from bytes to pixels, within limits."""
