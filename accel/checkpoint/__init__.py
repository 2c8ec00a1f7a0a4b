"""Checkpoints: per-rank shards, one record that is the commit, any world size and backend to any other."""

from .export import export
from .foreign import import_checkpoint
from .load import load
from .manage import latest, link
from .save import save
from .verify import verify

__all__ = ["export", "import_checkpoint", "latest", "link", "load", "save", "verify"]
