"""Checkpoints: one file per rank, and a record that commits them.

A tensor passes through the modules in this order:

    save.save   state, objects: the shard on this rank > plan: the rank that writes each box
                > shards: the bytes in a file > record, folder: the commit
    load.load   record > match, objects: the tensor to fill > reader: the bytes

Both use storage and remote for disks and object stores, values to encode plain values, and
steps to run a step on all ranks. background runs a save in a thread. weights reads and
writes the files of transformers and diffusers.
"""

from .folder import latest, link, verify
from .load import load
from .save import save
from .weights import export

__all__ = ["export", "latest", "link", "load", "save", "verify"]
