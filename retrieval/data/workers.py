"""Processes that decode training images, by torch's `DataLoader`."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.data.batches import BatchMaker, Job


class _Work(TorchDataset[Any]):
    """Runs in the worker: a job in, a batch out."""

    def __init__(self, make: BatchMaker) -> None:
        self.make = make

    def __getitem__(self, job: Job) -> Tensor | str:
        try:
            return self.make(job)
        except (
            DataError
        ) as error:  # raised over there it would come back as a traceback in a string
            return str(error)


class _Jobs(Sampler[Any]):
    """The jobs of the epoch under way."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


def _as_is(batch: Any) -> Any:
    return batch


class Workers:
    """Worker processes, started at the first epoch and kept until `close`.

    They are spawned, not forked: a forked child hangs once FAISS or OpenMP has run in the parent.

    Args:
        make: makes a batch.
        count: how many.
    """

    def __init__(self, make: BatchMaker, count: int) -> None:
        self._jobs = _Jobs()
        self._loader: DataLoader[Any] = DataLoader(
            _Work(make),
            batch_size=None,
            sampler=self._jobs,
            num_workers=count,
            collate_fn=_as_is,
            multiprocessing_context="spawn",
            persistent_workers=True,
            # by default it takes its base seed from the global generator, which the model draws
            # from too
            generator=torch.Generator().manual_seed(0),
        )

    def run(self, jobs: list[Job]) -> Iterator[Tensor]:
        """Yield each job's batch, in order.

        Raises:
            DataError: an item cannot be read, the dataset cannot be sent to another process, or a
                process died.
        """
        self._jobs.jobs = jobs
        try:
            made = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"The dataset cannot be sent to other processes ({error}). Set [train] workers = 0."
            ) from error
        while True:
            try:
                batch = next(made)
            except StopIteration:
                return
            except RuntimeError as error:
                if "exited unexpectedly" not in str(error):
                    raise
                raise DataError(
                    "A process that loads images died; the lines above say why. It may lack memory,"
                    " or the dataset's class may not be importable there. Set [train] workers = 0."
                ) from error
            if isinstance(batch, str):
                raise DataError(batch)
            yield batch

    def close(self) -> None:
        """End the processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None
