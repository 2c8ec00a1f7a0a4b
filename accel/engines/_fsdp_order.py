"""Whether all ranks gather and reduce the same things: FSDP2's collectives carry no names, so that it would mix them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final


@final
class Order:
    """Watches what each forward and backward gathers and reduces, and compares it where it is not as before.

    Each rank compares what differs from the last pass of the same kind. So a model that always does the same
    costs one comparison; a rank that does something else compares while the others may not come, which ends in an error.

    Args:
        groups: of FSDP2's parameters, in the same order on all ranks.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._now: list[object] = []
        self._last: dict[str, tuple[object, ...]] = {}
        self._passes = 0
        self._changed = False
        for number, group in enumerate(groups):
            self._watch(number, group)

    def close(self, kind: str) -> None:
        """End a pass; what comes next is another. Local."""
        done = tuple(self._now)
        self._now.clear()
        if done:
            self._changed = self._changed or self._last.get(kind) != done
            self._last[kind] = done
            self._passes = hash((self._passes, done))

    def drop(self) -> None:
        """Forget a pass that an exception ended. Local."""
        self._now.clear()

    def check(self, compare: Callable[[str, object, Callable[[list[Any]], str]], None]) -> None:
        """Compare the passes since the last check by ``compare(what, value, explain)``, where one was not as before.

        Raises:
            RankMismatchError: another rank used other parameters, or used them in another order.
        """
        passes, self._passes = self._passes, 0
        if self._changed:
            self._changed = False
            compare(
                "the parameters in use",
                passes,
                lambda _: "a forward or backward used other parameters, or in another order, and so got wrong values",
            )

    def _watch(self, number: int, group: Any) -> None:
        unshard, post_backward = group.unshard, group.post_backward

        def gather(*args: Any, **kwargs: Any) -> Any:
            idle = group._all_gather_result is None
            result = unshard(*args, **kwargs)
            if idle and group._all_gather_result is not None:
                self._now.append(number)
            return result

        def reduce(*args: Any) -> Any:
            if group.reduce_grads:
                came = tuple(i for i, p in enumerate(group.fsdp_params) if has_gradient(p))
                if came:
                    self._now.append((number, came))
            return post_backward(*args)

        group.unshard, group.post_backward = gather, reduce


def has_gradient(param: Any) -> bool:
    """Whether one of FSDP2's parameters has a gradient that was not reduced."""
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
