"""The library of the hub, and its errors as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from retrieval.errors import BundleError, RetrievalError, ServerError, needing

_REASON_CHARACTERS = 300
REPOSITORY = r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}"
"""Pattern of a repository's name, OWNER/NAME."""


def load_hub() -> Any:
    """Return the module `huggingface_hub`; raise `MissingDependency` if it is not installed."""
    with needing("Models on a hub need huggingface_hub", "hub"):
        import huggingface_hub
    return huggingface_hub


@contextmanager
def hub_errors(address: str) -> Iterator[None]:
    """Context manager that turns the hub's errors into sentences about an address.

    Raises:
        BundleError: the repository, its revision or a file does not exist, or may not be read.
        ServerError: the hub refuses the request, fails or cannot be reached.
    """
    load_hub()
    from huggingface_hub import constants, errors

    try:
        yield
    except (RetrievalError, KeyboardInterrupt):
        raise
    except (errors.RepositoryNotFoundError, errors.GatedRepoError):
        raise BundleError(
            f"{address} does not exist, or you may not read or change it. Check the name"
            " OWNER/NAME, and put your token into the environment variable HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise BundleError(f"{address} does not exist: there is no such revision.") from None
    except Exception as fault:  # the library passes on errors of its HTTP client
        status = getattr(getattr(fault, "response", None), "status_code", None)
        if status in (401, 403):
            raise BundleError(
                f"{address} cannot be opened or changed with your token. Put one that may into the"
                " environment variable HF_TOKEN."
            ) from None
        reason = " ".join(str(fault).split())[:_REASON_CHARACTERS].rstrip(".")
        raise ServerError(
            f"{address}: the hub {constants.ENDPOINT} failed or cannot be reached:"
            f" {reason or type(fault).__name__}.",
            status,
        ) from None
