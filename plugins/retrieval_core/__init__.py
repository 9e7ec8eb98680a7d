"""Backbones, datasets, learners and metrics that every user needs."""

from __future__ import annotations

from retrieval import hookimpl
from retrieval.hookspecs import Factories
