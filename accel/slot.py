"""Where a user's own object remembers what accel made of it."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")

_KEY = "_accel_slot"


class Slot(Generic[T]):
    """Holds one value on a foreign object; a copy or a pickle of that object finds it empty.

    The value lives as long as its owner, and the two may refer to each other: the cycle is
    on the owner, where the garbage collector sees it, not in a table that would keep both.
    """

    __slots__ = ("owner_id", "value")

    def __init__(self, owner: object, value: T) -> None:
        self.owner_id = id(owner)
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    @staticmethod
    def get(owner: object) -> Any:
        """The value in ``owner``'s slot, or None. A shallow copy of the owner carries the slot but does not own it."""
        slot = owner.__dict__.get(_KEY)
        return slot.value if slot is not None and slot.owner_id == id(owner) else None

    @staticmethod
    def put(owner: object, value: object) -> None:
        """Fill ``owner``'s slot."""
        owner.__dict__[_KEY] = Slot(owner, value)

    @staticmethod
    def clear(owner: object) -> None:
        """Empty ``owner``'s slot."""
        owner.__dict__.pop(_KEY, None)
