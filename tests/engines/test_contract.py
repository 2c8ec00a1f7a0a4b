"""What every backend must do: the parity matrix, over each engine that is found, at 1, 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends import BACKENDS, engine_of, need
from tests.distributed import run
from tests.engines.matrix import cells_of, check_cells, in_pairs


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_parity(backend: Any, world: int) -> None:
    """N steps on any number of ranks give the weights and optimizer state of one process on the whole batch."""
    need(backend)
    cells = cells_of(backend)
    if world > 1 and not engine_of(backend).synchronizes:
        with pytest.raises(AssertionError, match="each process would train a model"):
            run(world, check_cells, cells[:1])
        return
    for rank, failures in enumerate(run(world, check_cells, in_pairs(cells) if world > 2 else cells, timeout=240)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)
