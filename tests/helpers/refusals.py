"""The error message of a call."""

from collections.abc import Callable
from typing import Any

import pytest


def refusal(error: type[Exception], call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """Return the message of the error that a call must raise."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    return str(caught.value)
