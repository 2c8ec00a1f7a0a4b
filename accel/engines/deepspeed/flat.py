"""Stages 1 and 2 of DeepSpeed, with flat weights on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .library import accelerator, library
from .partitions import BUCKET, Partitions


@final
class Flat(Partitions):
    """The parameters of a model at stages 1 and 2."""

    def arrange(self) -> None:
        zero = self.zero
        self.snapshot.changed()
        #: DeepSpeed's group of each parameter, and the parameter's view of the flat memory.
        self._groups: dict[int, int] = {}
        self._places: dict[int, Tensor] = {}
        for number, parameters in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[number])
            first = size * dist.get_rank(zero.real_dp_process_group[number])
            flat = zero.bit16_groups_flat[number]
            for p in parameters:
                index = self.numbers[id(p)]
                self._groups[index] = number
                self._places[index] = p.data.view(self.shapes[index])
                offset = p.data.storage_offset() - flat.storage_offset()
                start = max(offset, first)
                numel = min(offset + p.numel(), first + size) - start
                if numel > 0:
                    home = flat.narrow(0, start, numel)
                    self.own(index, start - offset, home)
                p._hp_mapping = None
            # Free DeepSpeed's own fp32 copy of the weights. `_hp_mapping` had views of it.
            own_copy = zero.single_partition_of_fp32_groups[number]
            own_copy.data = torch.empty(0, device="cpu")
        zero.copy_grads_in_partition = self._collect
        zero.reduce_ipg_grads = self.announced(zero.reduce_ipg_grads, BUCKET)
        #: The stream on which DeepSpeed reduces, or None.
        self._stream = zero.reduction_stream if zero.overlap_comm else None

    def take(self, index: int) -> None:
        p, zero = self.parameters[index], self.zero
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        is_large = p.numel() > zero.reduce_bucket_size
        if self._stream is not None and is_large:
            # DeepSpeed drops a large gradient before its stream has finished the reduction.
            p.grad.record_stream(self._stream)
        zero.setup_buckets()
        group = self._groups[index]
        zero.reduce_independent_p_g_buckets_and_remove_grads(p, group)

    def _collect(self, p: nn.Parameter, _: int | None = None) -> None:
        """Take this rank's range of a reduced gradient."""
        fragment = self.fragment_of(p)
        if fragment is not None and p.grad is not None:
            fragment.accumulate(fragment.range_of(p.grad))
        p.grad = None

    def finish(self) -> None:
        zero = self.zero
        # A nested backward may have reduced the buckets already, and freed their memory.
        if any(bucket.params for bucket in zero.ipg_buckets.values()):
            zero.reduce_ipg_grads()
        self._wait_for_reductions()
        zero._clear_previous_reduced_grads()
        reduced = zero.params_already_reduced
        for p in self.floating.values():
            if reduced[zero.get_param_id(p)]:
                self._collect(p)
        self._free()
        self.wait_for_copies()

    def reset(self) -> None:
        zero = self.zero
        self._wait_for_reductions()
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        self._free()

    def _free(self) -> None:
        """Free the buckets, and mark all gradients as not reduced."""
        reduced = self.zero.params_already_reduced
        reduced[:] = [False] * len(reduced)
        self.zero._release_ipg_buffers()

    def _wait_for_reductions(self) -> None:
        if self._stream is not None:
            accelerator().current_stream().wait_stream(self._stream)

    def take_homes(self) -> None:
        # An in-place write changes the flat memory directly, but p.data = average doesn't.
        for index, place in self._places.items():
            p = self.parameters[index]
            if p.data_ptr() != place.data_ptr():
                place.copy_(p.data)
                p.data = place

    def gather(self) -> None:
        zero = self.zero
        library("deepspeed.runtime.utils").all_gather_dp_groups(
            groups_flat=zero.bit16_groups_flat,
            partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )

    def end(self, full: Sequence[Tensor]) -> None:
        super().end(full)
        # Otherwise DeepSpeed's objects keep the flat memory until a garbage collection.
        self._places.clear()
        self.zero.bit16_groups_flat.clear()
        self.zero.parallel_partitioned_bit16_groups.clear()
