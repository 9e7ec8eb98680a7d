"""The sentences by which calls are refused."""

from collections.abc import Callable
from typing import Any

import pytest


def refusal(error: type[Exception], call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """What the error says that a call must raise."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    return str(caught.value)
