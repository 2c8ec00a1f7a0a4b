"""What a state holds beside plain values: the objects that a checkpoint fills in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from .. import shard
from ..data import LoaderHandle
from ..engines import Engine
from ..errors import CheckpointError
from ..rng import RngState
from ..shard import Manifest, Shard
from .values import TAG, Decoder, Encoder, Json


@dataclass(frozen=True, slots=True)
class Listed:
    """A range that lies on this rank.

    Args:
        shard: the range, under its name in the checkpoint.
        sure: the ranks that list it have the same values; else this is compared, and the lowest rank's are saved.
        still: it may not have changed since the last checkpoint.
    """

    shard: Shard
    sure: bool
    still: bool = False


class Leaf(ABC):
    """One object of a state.

    Args:
        name: what the names of its tensors begin with.
        path: where it is in the state, for errors.
    """

    kind: ClassVar[str]
    #: What a saved node must have, with its type.
    fields: ClassVar[Mapping[str, type]] = {}
    #: Its node is made of all ranks' ``value``; else rank 0's is taken.
    merged = False

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        #: Its place in the record's values, filled in when the ranks have told theirs.
        self.node: dict[str, Json] = {TAG: self.kind}

    def listed(self) -> Iterator[Listed]:
        """The ranges that lie on this rank. Local."""
        return iter(())

    def value(self, encoder: Encoder) -> dict[str, Json]:
        """The rest of its node, as this rank knows it. Local."""
        return {}

    def merge(self, values: Sequence[dict[str, Json]]) -> dict[str, Json]:
        """The rest of its node, of all ranks' ``value``, where ``merged``."""
        return values[0]

    @classmethod
    def check(cls, node: Mapping[str, Json]) -> None:
        """Refuse a node that accel did not write.

        Raises:
            ValueError: says what is wrong.
        """
        for key, kind in cls.fields.items():
            if key not in node or not isinstance(node[key], kind):
                raise ValueError(f"{key!r} of a {cls.kind} is {str(node.get(key))[:60]}")

    def problem(self, node: Mapping[str, Json]) -> str:
        """Why this object cannot take a saved node; empty if it can. Local, changes nothing."""
        return ""

    def slots(self, manifest: Manifest, node: Mapping[str, Json]) -> list[tuple[str, Shard]]:
        """The ranges that this rank needs, each with the name of the saved tensor (without ``name``)."""
        return []

    @classmethod
    def encoded(cls, node: Mapping[str, Json]) -> list[Json]:
        """The values in a saved node that ``fill`` decodes."""
        return []

    @abstractmethod
    def fill(self, node: Mapping[str, Json], decoder: Decoder) -> None:
        """Take over what is no tensor; the slots are filled."""

    def undo(self) -> Callable[[], None]:
        """What brings back how it is now, after ``slots`` have created state."""
        return lambda: None

    @property
    def engine(self) -> Engine | None:
        """The engine that must hear that its slots were filled."""
        return None


def models(leaves: Iterable[Leaf]) -> dict[str, str]:
    """By path the models with an engine: two of one class have equal names and shapes, which hides them from other checks."""
    return {leaf.path: leaf.engine.label for leaf in leaves if leaf.engine is not None}


@dataclass(frozen=True, slots=True)
class Ready:
    """In a state: an object whose leaf is known already; gets the leaf's name and path."""

    leaf: Callable[[str, str], Leaf]


def full_names(leaf: Leaf, shards: Sequence[Shard]) -> Iterator[Shard]:
    """The shards under their names in the checkpoint."""
    return (Shard(f"{leaf.name}/{s.name}", s.shape, s.start, s.tensor) for s in shards)


@final
class StatefulLeaf(Leaf):
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, scalers, samplers, loader handles."""

    kind = "stateful"
    fields: ClassVar[Mapping[str, type]] = {"state": object}

    def __init__(self, name: str, path: str, value: Any) -> None:
        super().__init__(name, path)
        self.value_object = value

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {"state": encoder.encode(self.value_object.state_dict(), f"{self.path}.state_dict()")}

    @classmethod
    def encoded(cls, node: Mapping[str, Json]) -> list[Json]:
        return [node["state"]]

    def fill(self, node: Mapping[str, Json], decoder: Decoder) -> None:
        self.value_object.load_state_dict(decoder.decode(node["state"]))


@final
class TensorLeaf(Leaf):
    """A tensor in the state, which is filled in place."""

    kind = "tensor"

    def __init__(self, name: str, path: str, tensor: torch.Tensor) -> None:
        super().__init__(name, path)
        self._tensor = tensor

    def _shard(self, name: str) -> Shard:
        return shard.whole(name, self._tensor)

    def listed(self) -> Iterator[Listed]:
        yield Listed(self._shard(self.name), sure=False)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {"name": self.name}

    def problem(self, node: Mapping[str, Json]) -> str:
        return "" if "name" in node else "the checkpoint has a small tensor inside a value here"

    def slots(self, manifest: Manifest, node: Mapping[str, Json]) -> list[tuple[str, Shard]]:
        return [("", self._shard(self.name))]

    def fill(self, node: Mapping[str, Json], decoder: Decoder) -> None:
        return


@final
class RankLeaf(Leaf):
    """What each rank has its own state of: the random generators, and loaders that each rank reads by itself."""

    kind = "ranks"
    fields: ClassVar[Mapping[str, type]] = {"name": str}

    def __init__(self, name: str, path: str, value: RngState | LoaderHandle) -> None:
        super().__init__(name, path)
        self._object = value

    def own(self, encoder: Encoder) -> Json:
        """This rank's value."""
        return encoder.encode(self._object.state_dict(), self.path)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {"name": self.name}

    def fill(self, node: Mapping[str, Json], decoder: Decoder) -> None:
        raise CheckpointError(f"{self.path}: filled with fill_own")

    def fill_own(self, values: Sequence[Json], decoder: Decoder, rank: int) -> None:
        """Take over this rank's value; a rank that the saving job did not have draws numbers of its own."""
        state = decoder.decode(values[rank % len(values)])
        self._object.load_state_dict(state)
        if rank >= len(values) and isinstance(self._object, RngState):
            self._object.diverge(rank)
