"""What FSDP2 gathers and reduces, announced before it does so."""

from __future__ import annotations

from typing import Any

from ..control import Waiting, announce
from ..process import Process


def watch(process: Process, group: Any, name: str, title: str) -> None:
    """Announce what one group of FSDP2's parameters gathers and reduces; ``name`` is its module's."""
    unshard, post_backward = group.unshard, group.post_backward
    gathering, reducing = (f"the {verb} of {name} ({title})" for verb in ("gathering", "reduction"))
    in_gather, in_reduce = Waiting(process, gathering), Waiting(process, reducing)

    def gather(*args: Any, **kwargs: Any) -> Any:
        if group._all_gather_result is not None or group.is_unsharded:
            return unshard(*args, **kwargs)
        announce(process, gathering)
        with in_gather:
            return unshard(*args, **kwargs)

    def reduce(*args: Any) -> Any:
        came = tuple(i for i, p in enumerate(group.fsdp_params) if has_gradient(p)) if group.reduce_grads else ()
        if not came:
            return post_backward(*args)
        announce(process, reducing, came)
        with in_reduce:
            return post_backward(*args)

    group.unshard, group.post_backward = gather, reduce


def has_gradient(param: Any) -> bool:
    """Whether one of FSDP2's parameters has a gradient that was not reduced."""
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
