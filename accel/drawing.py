"""Pictures: matplotlib, which need not be installed, and the file that they go to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .errors import AccelError
from .paths import refuse_url


def new_figure(path: str | os.PathLike[str], width: float, height: float) -> Any:
    """An empty figure in inches, for a picture that will be at ``path``.

    Raises:
        AccelError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AccelError(
            f"the picture {os.fspath(path)} needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def write_figure(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write the picture, in the form that the path's suffix says; makes the directory.

    Raises:
        AccelError: it cannot be written there, or in such a form.
    """
    path = Path(refuse_url(os.fspath(path), AccelError))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise AccelError(f"the picture {path} cannot be written: {error}") from error
    return path
