"""Messages of errors that calls must raise."""

from collections.abc import Callable
from typing import Any

import pytest


def refusal(
    error: type[Exception], call: Callable[..., Any], *arguments: Any, **options: Any
) -> str:
    """Return the message of the error that a call must raise."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    return str(caught.value)
