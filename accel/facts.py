"""Comparison of the ranks' facts: a text for each value, and the first name whose texts differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch


def comparable_text(value: Any) -> str:
    """Return a text that is equal on all ranks if the value is.

    A tensor is described by its shape and sum, and a shard of a DTensor by its shape only. An
    object without a text of its own is described by its class.
    """
    if isinstance(value, torch.Tensor):
        total = "in shards" if hasattr(value, "to_local") else value.detach().double().sum().item()
        return f"tensor {tuple(value.shape)} {total}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(comparable_text, value))}]"
    if isinstance(value, set | frozenset):  # its order depends on the process
        return f"{{{', '.join(sorted(map(comparable_text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{comparable_text(list(value.items()))}}}"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def differing_names(
    facts_by_rank: Iterable[Mapping[Any, Any]], *, ignore_absent: bool = False
) -> list[Any]:
    """Return the names of the facts that are not equal on all ranks, in order.

    With ``ignore_absent`` only the ranks that have a fact are compared.
    """
    all_facts = list(facts_by_rank)
    names = dict.fromkeys(chain.from_iterable(all_facts))
    differing = []
    for name in names:
        values = {facts.get(name) for facts in all_facts if name in facts or not ignore_absent}
        if len(values) > 1:
            differing.append(name)
    return differing


def first_difference(facts_by_rank: Sequence[Mapping[str, Any]]) -> str:
    """Return the first name whose values differ, with the ranks' values, or an empty text.

    An example is "lr of group 0 is 0.1 on ranks 0, 1; 0.2 on rank 2".
    """
    names = differing_names(facts_by_rank)
    return f"{names[0]} is {values_by_rank(names[0], facts_by_rank)}" if names else ""


def values_by_rank(
    name: Any, facts_by_rank: Sequence[Mapping[Any, Any]], *, ignore_absent: bool = False
) -> str:
    """Return the ranks' values of a fact, such as "0.1 on ranks 0, 1; 0.2 on rank 2"."""
    ranks_by_value: dict[Any, list[str]] = {}
    for rank, facts in enumerate(facts_by_rank):
        if ignore_absent and name not in facts:
            continue
        ranks_by_value.setdefault(facts.get(name, "absent"), []).append(str(rank))
    texts = []
    for value, ranks in ranks_by_value.items():
        texts.append(f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    return "; ".join(texts)
