"""Checkpoints: per-rank shards, one record that is the commit, any world size and backend to any other.

save > job > draft (what all ranks have) > listing, layout (who writes what) > shards (bytes) > record (the commit)
load > weights (what is there), schema (whether it can be) > meeting (state and checkpoint) > verify > reader (bytes)
export > extract (what goes where) > reader; import_checkpoint > foreign, dcp (reading) > adopt (what is what) > job
"""

from .export import export
from .foreign import import_checkpoint
from .load import load
from .manage import latest, link
from .save import save
from .verify import verify

__all__ = ["export", "import_checkpoint", "latest", "link", "load", "save", "verify"]
