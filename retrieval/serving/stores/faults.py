"""Why a store does not answer, where nothing is wrong with what it keeps."""

from __future__ import annotations

from retrieval.errors import StoreError


class Superseded(StoreError):
    """What was asked with one bundle, and the index is served by another by now. Encode again with the one that is served."""


class StoreUnavailable(StoreError):
    """A store cannot be reached now, and nothing is known to be damaged: ask again in a moment. A write that was under way may have been made
    or not; the same one made again changes nothing more."""


class TooSlow(StoreError):
    """A question took longer than it may. Nothing is damaged: ask for less."""
