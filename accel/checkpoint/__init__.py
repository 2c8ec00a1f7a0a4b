"""Checkpoints: per-rank shards, one record that is the commit, any world size and backend to any other.

A tensor's way into a checkpoint, and out of it:

    save.save   contents_of: where it lies on this rank (state, objects) > Contents.complete: who writes which range (layout)
                > Writer.write: its bytes, in this rank's file (shards) > Writer.commit: the record of all files (record)
    load.load   open_checkpoint: the record (weights) > Loading: where it belongs, as ranges of it (match, objects)
                > Loading.apply: its bytes, compared with their checksums, in place (reader)

Both: steps (of all ranks: one's failure is everyone's, and what is refused, missing or damaged is a CheckpointError), values
(what is no tensor), folder (the names in a directory), safetensors (the form of a file), storage and remote (disks and object
stores). Beside: background (saves that go on) and weights (other libraries' files, written and read).
"""

from .folder import latest, link
from .load import load
from .save import save
from .verify import verify
from .weights import export

__all__ = ["export", "latest", "link", "load", "save", "verify"]
