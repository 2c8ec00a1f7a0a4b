"""Checkpoints as wholes: the newest one, a second name for one, the oldest ones away, all bytes compared."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import Final

from ..errors import CheckpointError
from ..process import rank
from ..process.control import locked
from . import folder, record
from .background import background
from .failures import explain, on_every_rank
from .record import Record

_NUMBERED: Final = re.compile(r"(.*?)(\d+)")


def check_keep(directory: str, keep: object) -> None:
    """Refuse a number, or a directory whose older ones nobody can tell.

    Raises:
        CheckpointError: says what is expected.
    """
    if type(keep) is not int or keep < 1:
        raise CheckpointError(f"keep={keep!r}: expected a number of checkpoints of at least 1")
    if not _NUMBERED.fullmatch(os.path.basename(os.path.abspath(directory))):
        raise CheckpointError(
            f"keep={keep}: the name of {directory!r} does not end in a number, so that its older ones are not known; save "
            "into directories such as 'ckpt/step-100'"
        )


def prune(directory: str, keep: int) -> None:
    """Remove the oldest checkpoints of the series of ``directory``, but never that one itself."""
    root, name = os.path.split(os.path.abspath(directory))
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    series = []
    for other in os.listdir(root):
        found = _NUMBERED.fullmatch(other)
        path = os.path.join(root, other)
        if found and found[1] == match[1] and other != name and not os.path.islink(path):
            one = folder.complete(path)
            if one is not None:
                series.append((one.time, path))
    for _, path in sorted(series, reverse=True)[keep - 1 :]:
        with contextlib.suppress(CheckpointError):  # somebody saves there
            folder.remove(path)


def latest(root: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in ``root``, or ``root`` itself; None if there is none. Local.

    Args:
        root: a directory of checkpoints; it need not exist. One in it that is damaged or not complete is passed over, with a
            warning that names it.

    Raises:
        CheckpointError: ``root`` is there, and cannot be read.
    """
    background.wait()
    path = folder.named(root)
    candidates = [path]
    try:
        candidates += [os.path.join(path, name) for name in os.listdir(path)]
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # there may be one
        raise CheckpointError(f"accel.latest: {explain(error)}") from error
    found = []
    for candidate in candidates:
        one = folder.complete(candidate)
        if one is not None:
            found.append((one.time, candidate))
    return max(found)[1] if found else None


@locked
def link(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Make ``dst`` a second name of the checkpoint ``src``: its files are linked, so that either can be removed. Collective.

    A checkpoint that ``dst`` has already is replaced.

    Raises:
        CheckpointError: ``src`` is no complete checkpoint, or ``dst`` cannot be written.
    """

    def act() -> None:
        background.wait()
        if rank() == 0:
            _link(folder.absolute(src), folder.absolute(dst))

    on_every_rank("accel.link", act)


def _link(src: str, dst: str) -> None:
    if os.path.realpath(src) == os.path.realpath(dst):
        return
    one, _ = record.read(src)
    folder.check_sizes(src, one)
    folder.make(dst)
    lock = folder.Lock(dst)
    try:
        old = folder.present(dst)
        folder.sweep(dst, {file.name for file in old.files} if old else ())
        _link_files(src, dst, one, {file.name for file in old.files} if old else set())
        record.sync(dst)
        temporary = folder.record_name(one.id)
        with open(os.path.join(src, record.NAME), "rb") as file:
            content = file.read()
        if record.parse(content, src)[0].id != one.id:
            raise CheckpointError(f"{src} was replaced while it was linked; link it again")
        record.commit(dst, content, temporary)
        folder.sweep(dst, {file.name for file in one.files})
    finally:
        lock.release()


def _link_files(src: str, dst: str, one: Record, present: set[str]) -> None:
    for file in one.files:
        source, target = os.path.join(src, file.name), os.path.join(dst, file.name)
        if file.name in present:
            if os.path.samefile(source, target):
                continue
            # The same save, copied by hand; a name on the way makes the exchange atomic.
            passing = os.path.join(dst, f".accel-{one.id}-{secrets.randbelow(10**5):05d}.done.tmp")
            os.link(source, passing)
            os.replace(passing, target)
        else:
            try:
                os.link(source, target)
            except OSError as error:
                raise CheckpointError(f"{explain(error)}; both must be on one file system that has links") from error
