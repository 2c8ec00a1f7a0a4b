"""Checkpoints: a file for each rank, and a record as the commit.

The files in the order in which a tensor goes through them:

    save.save   state, objects: its shard on this rank > plan: who writes which box
                > shards: its bytes in a file > record, folder: the commit
    load.load   record > match, objects: where it goes > reader: its bytes

Both use storage and remote for disks and object stores, values for plain values, and
steps for the exchanges of ranks. background runs a save in a thread. weights reads and
writes the files of transformers and diffusers.
"""

from .folder import latest, link, verify
from .load import load
from .save import save
from .weights import export

__all__ = ["export", "latest", "link", "load", "save", "verify"]
