"""Compare the ranks' facts as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor


def comparable_text(value: Any) -> str:
    """Return a text that is equal on all ranks if the value is.

    A tensor is described by its shape and sum, a DTensor by its shape, and an
    object without its own ``repr`` by its class.
    """
    if isinstance(value, Tensor):
        is_shard = hasattr(value, "to_local")
        total = "in shards" if is_shard else value.detach().double().sum().item()
        return f"tensor {tuple(value.shape)} {total}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(comparable_text, value))}]"
    if isinstance(value, set | frozenset):
        # The order of a set depends on the process.
        return f"{{{', '.join(sorted(map(comparable_text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{comparable_text(list(value.items()))}}}"
    # The repr of a function contains its address, which differs between processes.
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def first_difference(
    facts_by_rank: Sequence[Mapping[Any, Any]], *, ignore_absent: bool = False
) -> str:
    """Describe the first fact that differs, or return an empty string.

    An example is "lr of group 0 is 0.1 on ranks 0, 1; 0.2 on rank 2". With
    ``ignore_absent``, ranks that lack a fact are skipped.
    """
    for name in dict.fromkeys(chain.from_iterable(facts_by_rank)):
        ranks_by_value: dict[Any, list[str]] = {}
        for rank, facts in enumerate(facts_by_rank):
            if name in facts or not ignore_absent:
                value = facts.get(name, "absent")
                ranks_by_value.setdefault(value, []).append(str(rank))
        if len(ranks_by_value) > 1:
            texts = []
            for value, ranks in ranks_by_value.items():
                unit = "rank" if len(ranks) == 1 else "ranks"
                texts.append(f"{value} on {unit} {', '.join(ranks)}")
            return f"{name} is {'; '.join(texts)}"
    return ""
