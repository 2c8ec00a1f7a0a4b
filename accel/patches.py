"""What accel changes in other libraries: only while something of its own needs it, and so that others can change it too.

Every such change is made here: a function of a module, a value, a filter of warnings. Where another library has put something
of its own in the place since, that stays, and what of accel is inside of it passes the calls on.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Final, final

_ABSENT: Final = object()


@final
class Patch:
    """A function that another one stands in for, from ``install`` to ``remove``. A context, too.

    Args:
        owner: where it is: ``vars`` of a module, or a table.
        name: under what.
        act: is called in its place, with the function that was there before the arguments.
        default: stands for a function that is not there.
    """

    def __init__(
        self,
        owner: MutableMapping[Any, Any],
        name: Any,
        act: Callable[..., Any],
        default: Callable[..., Any] | None = None,
    ) -> None:
        self._owner = owner
        self._name = name
        self._act = act
        self._default = default
        self._live = False
        #: What was put there, with what was there before: as long as it may be inside of somebody's own.
        self._made: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Put it there; again only where it is not."""
        self._live = True
        current = self._owner.get(self._name, _ABSENT)
        if not any(made is current for made, _ in self._made):
            self._made.append((self._standing_for(current), current))
            self._owner[self._name] = self._made[-1][0]

    def remove(self) -> None:
        """Put back what was there, unless somebody has put something else there."""
        self._live = False
        current = first = self._owner.get(self._name, _ABSENT)
        for made, before in reversed(self._made):
            current = before if made is current else current
        if current is first:
            return
        self._made.clear()
        if current is _ABSENT:
            del self._owner[self._name]
        else:
            self._owner[self._name] = current

    def _standing_for(self, found: Any) -> Callable[..., Any]:
        original: Any = self._default if found is _ABSENT else found

        def patched(*args: Any, **kwargs: Any) -> Any:
            return self._act(original, *args, **kwargs) if self._live else original(*args, **kwargs)

        return functools.wraps(original)(patched)

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *error: object) -> None:
        self.remove()


@contextlib.contextmanager
def replaced(owner: MutableMapping[Any, Any], name: Any, value: Any) -> Iterator[None]:
    """Inside, ``owner[name]`` is ``value``; what somebody puts there meanwhile stays."""
    before = owner.get(name, _ABSENT)
    owner[name] = value
    try:
        yield
    finally:
        if owner.get(name, _ABSENT) == value:
            if before is _ABSENT:
                del owner[name]
            else:
                owner[name] = before


def ignore_warnings(message: str = "", category: type[Warning] = Warning) -> Callable[[], None]:
    """Ignore warnings that begin with the regular expression ``message``, until what is returned is called.

    Unlike ``warnings.catch_warnings`` it leaves alone the filters that others add or remove meanwhile.
    """
    entry: Any = ("ignore", re.compile(message, re.IGNORECASE) if message else None, category, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined, unused-ignore]

    def undo() -> None:
        found: Any = warnings.filters
        found[:] = [one for one in found if one is not entry]

    return undo
