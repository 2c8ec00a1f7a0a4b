"""Checkpoints: per-rank shards, one record that is the commit, any world size and backend to any other."""

from .export import export
from .folder import latest, link
from .foreign import import_checkpoint
from .load import load
from .save import save
from .verify import verify

__all__ = ["export", "import_checkpoint", "latest", "link", "load", "save", "verify"]
