"""Checkpoints: per-rank shards, one record that is the commit, any world size and backend to any other.

A tensor's way into a checkpoint, and out of it:

    save > state, objects (where it lies on this rank) > layout (who writes which range) > shards (its bytes) > record (commit)
    load > weights (what is there) > match, objects (where it belongs) > verify (is it whole) > reader (its bytes, in place)

Both: values (what is no tensor), folder (the names in a directory), safetensors (the form of a file), failures (one rank's is
everyone's: what is refused, missing or damaged is a CheckpointError). Beside: background (saves that go on), export and foreign
(other libraries' files, written and read).
"""

from .export import export
from .folder import latest, link
from .foreign import import_checkpoint
from .load import load
from .save import save
from .verify import verify

__all__ = ["export", "import_checkpoint", "latest", "link", "load", "save", "verify"]
