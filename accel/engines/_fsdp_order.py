"""What FSDP2 gathers and reduces, told as it does so."""

from __future__ import annotations

from typing import Any

from ._order import Order


def watch(order: Order, number: int, group: Any) -> None:
    """Tell ``order`` what one group of FSDP2's parameters gathers and reduces."""
    unshard, post_backward = group.unshard, group.post_backward

    def gather(*args: Any, **kwargs: Any) -> Any:
        idle = group._all_gather_result is None
        result = unshard(*args, **kwargs)
        if idle and group._all_gather_result is not None:
            order.note(number)
        return result

    def reduce(*args: Any) -> Any:
        if group.reduce_grads:
            came = tuple(i for i, p in enumerate(group.fsdp_params) if has_gradient(p))
            if came:
                order.note((number, came))
        return post_backward(*args)

    group.unshard, group.post_backward = gather, reduce


def has_gradient(param: Any) -> bool:
    """Whether one of FSDP2's parameters has a gradient that was not reduced."""
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
