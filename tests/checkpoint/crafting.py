"""Changes to checkpoints that keep all checksums right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel.checkpoint.shards import checksum


def shard_of(directory: Path) -> Path:
    return next(directory.glob("*.safetensors"))


def body_of(directory: Path) -> dict[str, Any]:
    """The record without its checksum."""
    body: dict[str, Any] = json.loads((directory / "accel.json").read_bytes())
    del body["xxh3"]
    return body


def write_record(directory: Path, text: str) -> None:
    """Write a record with the checksum that it should have."""
    content = text.encode("utf-8", "surrogatepass").rstrip()[:-1]
    (directory / "accel.json").write_bytes(content + f',"xxh3":"{checksum(content)}"}}'.encode())


def rewrite(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the record; ``change`` returns its text, or changes its content in place."""
    body = body_of(directory)
    text = change(body)
    write_record(directory, text if isinstance(text, str) else json.dumps(body, separators=(",", ":")))
