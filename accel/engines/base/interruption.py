"""Gradients after an exception in a backward."""

from __future__ import annotations

from typing import final

from ...errors import BackendError


@final
class Interruption:
    """Remembers incomplete gradients until they are dropped. Local."""

    def __init__(self) -> None:
        self.incomplete = False

    def refuse(self) -> None:
        """Raise BackendError if gradients are incomplete."""
        if self.incomplete:
            raise BackendError(
                "The gradients are incomplete, because an exception interrupted "
                "backward(). Call optimizer.zero_grad(), then run forward "
                "and backward again."
            )
