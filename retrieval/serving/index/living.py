"""A living index: items come, change and go, generations follow each other, and it is searched all the while."""

from __future__ import annotations

from collections.abc import Sequence

from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.places import StrPath
from retrieval.serving.filters import as_filter
from retrieval.serving.images import Limits
from retrieval.serving.index.adding import Added, add_sources
from retrieval.serving.index.alike import Alike, Cluster, clusters, duplicates
from retrieval.serving.index.base import Where
from retrieval.serving.index.collection import Collection
from retrieval.serving.index.migrating import Migrated, migrate, rollback
from retrieval.serving.index.tuning import Tuned, tune
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.store.contract import Keep


class LivingIndex(Collection):
    """An opened index that lives. Its methods may be called from several threads at once."""

    def add(
        self,
        sources: StrPath | Sequence[StrPath],
        *,
        keep: Keep = "reference",
        sync: bool = False,
        skip_bad: bool = False,
        batch: int = 32,
        workers: int | None = None,
        limits: Limits | None = None,
        progress: Progress = True,
    ) -> Added:
        """Embed images or features and add them; what is there and has not changed is passed over.

        What was added is on the disk from second to second: after a kill the same call goes on.

        Args:
            sources: one or more files, folders, CSV manifests, Parquet tables, tar shards, or `.npz` features; see `retrieval.serving.index.sources.collect`.
            keep: what the index keeps of originals: "reference", "copy", "thumbnail" or "nothing".
            sync: make the index equal to the sources: items that they do not name are deleted.
            skip_bad: pass over images that cannot be used; without it they are all named in the error, and the others are added.
            batch: items that go through the encoder at once.
            workers: threads that decode; as many as there are cores by default.
            limits: the largest images that are decoded.
            progress: True shows a bar, False nothing; a function is told (what, done, total).

        Raises:
            DataError: no items, an id twice, or images that cannot be used.
            StoreError: read-only, another writer holds the index, or the disk refuses.
        """
        return add_sources(
            self, sources, keep=keep, sync=sync, skip_bad=skip_bad, batch=batch, workers=workers, limits=limits, progress=progress
        )  # fmt: skip

    def migrate(
        self, bundle: StrPath | Bundle, *, skip_bad: bool = False, progress: Progress = True
    ) -> Migrated:
        """Embed all items with another bundle, then serve that; searches and writes go on meanwhile.

        Where the index keeps features and the bundle's backbone is theirs (`Bundle.backbone_sha256`), its head is applied to them: no
        original is opened. So is a bundle of features of their width: then it is served behind the index's own backbone, and images are
        queries as before; that these features are the ones it was learned on is for you to know. Otherwise originals are embedded again.

        An answer is of one bundle, always. The old generation is kept for `rollback` until it is dropped. After a kill the same
        call goes on.

        Args:
            bundle: a bundle, or its folder.
            skip_bad: leave out items whose original is gone or cannot be used; without it they are named, and nothing is switched.
            progress: True shows a bar, False nothing; a function is told (what, done, total).

        Raises:
            DataError: an item's original is gone or cannot be used.
            BundleError: the bundle takes features, and the index keeps none, or of another width.
            StoreError: read-only, another writer holds the index, or the disk refuses.
        """
        return migrate(self, bundle, skip_bad=skip_bad, progress=progress)

    def rollback(self, *, progress: Progress = True) -> Migrated:
        """Serve the generation before; items that came since are embedded for it first."""
        return rollback(self, progress=progress)

    def drop_old(self) -> int:
        """Delete every generation that is not served; return how many."""
        others = [one for one in self.store.generations() if one.state != "served"]
        for one in others:
            self.store.drop(one)
        return len(others)

    def duplicates(self, within: float, *, where: Where = None, progress: Progress = True) -> list[Alike]:
        """Return groups of items within a distance of one another, directly or through others; the largest group first.

        Args:
            within: the distance, as searches give it.
            where: only among items that match.
            progress: True shows a bar, False nothing; a function is told (what, done, total).
        """
        with showing(progress):
            return duplicates(self, within, where=as_filter(where))

    def clusters(self, count: int, *, where: Where = None, progress: Progress = True) -> list[Cluster]:
        """Return clusters of items by k-means on their vectors, the largest first.

        Args:
            count: how many.
            where: only items that match.
            progress: True shows a bar, False nothing; a function is told (what, done, total).

        Raises:
            DataError: there are fewer items.
        """
        with showing(progress):
            return clusters(self, count, where=as_filter(where))

    def tune(
        self,
        *,
        recall: float = 0.95,
        memory: int | None = None,
        most: int = 200_000,
        apply: bool = True,
        progress: Progress = True,
    ) -> Tuned:
        """Measure which structure finds fastest what it must, on this index's own vectors, and take it; the index keeps the table.

        200 vectors are held out as queries; structures are built over the others, at most `most` of them.

        Args:
            recall: share of the ten nearest that must be found.
            memory: bytes of the vectors and the structure together; None for no limit.
            most: vectors that structures are built over, taken at random where there are more.
            apply: whether to keep the table, and build the chosen structure for the index's segments, now.
            progress: True shows a bar, False nothing; a function is told (what, done, total).

        Raises:
            DataError: limits that are none, or too few items.
            StoreError: the store chooses structures itself, or the index cannot be written to.
        """
        store = self.store
        if not store.structures:
            raise StoreError(
                f"The store of {self.path} chooses by itself how it searches: there is nothing to tune."
            )
        with showing(progress):
            tuned = tune(self, recall=recall, memory=memory, most=most)
            if not apply:
                return tuned
            store.keep_tuned(tuned.as_dict())
            if tuned.chosen is not None:
                with Meter("indexing", len(self), "items") as meter:
                    store.take_structure(
                        tuned.chosen.backend,
                        tuned.chosen.options,
                        lambda done, total: meter.reach(done, total, "indexing"),
                    )
        return tuned
