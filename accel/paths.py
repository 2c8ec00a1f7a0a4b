"""Paths that users name."""

from __future__ import annotations

import re
from typing import Final

from .errors import AccelError

#: Also as a Path has it, which makes one slash of two, and a chain of them: "simplecache::s3://bucket".
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/|:)")


def refuse_url(path: str, error: type[AccelError]) -> str:
    """The same path, unless it is a URL, of which the system would make a local directory named ``s3:``.

    Raises:
        AccelError: it is; of the kind ``error``.
    """
    if match := _URL.match(path):
        how = "mount the bucket, or copy what was written there"
        if match[1].lower() == "file":
            how = f"give the path alone, {'/' + path[len(match[0]) :].lstrip('/')!r}"
        raise error(
            f"{path} is a URL, and accel reads and writes the file systems of this machine: {how} (a directory that does have "
            f"this name is './{path}')"
        )
    return path
