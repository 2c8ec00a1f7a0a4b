"""What ZeRO does with devices, as far as a CPU can show it: which one it takes, and what its streams wait for, by stand-ins."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

import accel
from accel.engines.deepspeed import DeepSpeed
from accel.engines.deepspeed.library import _quietly, accelerator, library
from accel.registry import registry
from tests.distributed import run
from tests.engines.deepspeed.training import STAGES, Net, Pair, adamw, data, loss_of, whole, zero

# -- the device -------------------------------------------------------------------------------------------------------


def started_by(stage: int, variables: dict[str, str]) -> None:
    accel.init()
    others = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    with mock.patch.dict(os.environ, {**others, **variables}, clear=True):
        before = dict(os.environ)
        pair = Pair(zero(stage))
        assert dict(os.environ) == before
        pair.train()
        pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_launchers_without_a_local_rank(stage: int) -> None:
    run(2, started_by, stage, {"LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"} if stage == 2 else {})


def test_deepspeed_takes_accels_device() -> None:
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        with _quietly(torch.device("cuda", 5)):
            assert os.environ["LOCAL_RANK"] == "5"
        assert os.environ["LOCAL_RANK"] == "0"


# -- streams ----------------------------------------------------------------------------------------------------------


class Stream:
    """Stands in for a stream of a device: on the CPU all is done in order, and there are none."""

    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def wait_stream(self, other: Any) -> None:
        self.seen(other)


def gathered_after_writes() -> None:
    """When weights are gathered, the stream that gathers has waited for the shards as they are."""
    waited: list[Any] = []
    gathers = []
    raw: Any = Net()
    weights = list(raw.parameters())
    # Bits: what fills up the last rank's shard is memory that nobody wrote to, also such as is no number.
    shards = lambda: [w.ds_tensor.clone().view(torch.int32) for w in weights]  # noqa: E731
    stream = Stream(lambda _: waited.append(shards()))

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "allgather_stream": stream})

    def checked(gather: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            gathers.append(bool(waited) and all(map(torch.equal, waited[-1], shards())))
            return gather(*args, **kwargs)

        return call

    accel.teardown(Pair(zero(3)).model)  # imports the library
    coordinator = library("deepspeed.runtime.zero.partitioned_param_coordinator").PartitionedParameterCoordinator
    original = coordinator.__init__
    with mock.patch.object(coordinator, "__init__", init):
        model, optimizer, _ = accel.setup(raw, adamw(raw), backend=zero(3))
    for weight in weights:
        vars(weight)["all_gather_coalesced"] = checked(vars(weight)["all_gather_coalesced"])

    def train() -> None:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model(data(step, accel.rank()))).backward()
            optimizer.step()

    train()
    model.load_state_dict({k: v * 0.5 for k, v in whole(model).items()})
    with torch.no_grad():
        model(data(0, 0))
    assert len(gathers) >= 10
    assert all(gathers)


def test_weights_are_gathered_after_they_were_written() -> None:
    run(2, gathered_after_writes)


def read_beside(config: dict[str, Any]) -> None:
    """Gradients that are too large for a bucket are reduced where they lie, on a stream beside the backward."""
    pair = Pair(
        DeepSpeed(stage=2, config={"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 30, **config}})
    )
    partitions = registry.find_engine(pair.model).zero
    events: list[Any] = []
    beside, main = Stream(None), Stream(lambda other: events.append(("waited", other is beside)))
    partitions._stream = partitions.zero.reduction_stream = beside

    def record(tensor: torch.Tensor, stream: Any) -> None:
        events.append((tensor.numel(), stream is beside))

    with (
        mock.patch.object(torch.Tensor, "record_stream", record),
        mock.patch.object(type(accelerator()), "current_stream", return_value=main),
    ):
        pair.train(range(2))
    large = [p.numel() for p in pair.raw.parameters() if p.numel() > 30]
    assert sorted(n for n, _ in events if n in large) == sorted(2 * large)
    assert events.count(("waited", True)) == 2
    assert all(right for _, right in events)
    pair.check()


def test_memory_of_large_gradients_is_kept() -> None:
    run(3, read_beside, {})
    run(2, read_beside, {"reduce_scatter": False})
