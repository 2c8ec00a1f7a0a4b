"""Stages 1 and 2 of DeepSpeed: each rank has all weights in flat memory, and owns a range of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from .library import accelerator, library
from .partitions import Partitions


@final
class Flat(Partitions):
    """The parameters of a model at stages 1 and 2."""

    def arrange(self) -> None:
        zero = self.zero
        self.snapshot.changed()
        #: The group and the place in the flat memory of each parameter.
        self._groups: dict[int, int] = {}
        self._places: dict[int, torch.Tensor] = {}
        for number, parameters in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[number])
            first = size * dist.get_rank(zero.real_dp_process_group[number])
            flat = zero.bit16_groups_flat[number]
            for parameter in parameters:
                index = self.numbers[id(parameter)]
                self._groups[index] = number
                self._places[index] = parameter.data.view(self.shapes[index])
                offset = parameter.data.storage_offset() - flat.storage_offset()
                start, end = max(offset, first), min(offset + parameter.numel(), first + size)
                if start < end:
                    self.own(index, start - offset, flat.narrow(0, start, end - start))
                parameter._hp_mapping = None
            # DeepSpeed's own copy of the weights, of which `_hp_mapping` had views.
            zero.single_partition_of_fp32_groups[number].data = torch.empty(0, device="cpu")
        zero.copy_grads_in_partition = self._collect
        zero.reduce_ipg_grads = self.announced(zero.reduce_ipg_grads, "the reduction of a bucket")
        #: The stream on which DeepSpeed reduces, or None.
        self._stream = zero.reduction_stream if zero.overlap_comm else None

    # -- gradients --------------------------------------------------------------------------------

    def take(self, index: int) -> None:
        parameter, zero = self.parameters[index], self.zero
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if self._stream is not None and parameter.numel() > zero.reduce_bucket_size:
            # DeepSpeed drops it before it has reduced it, so its memory must stay reserved.
            parameter.grad.record_stream(self._stream)
        zero.setup_buckets()
        zero.reduce_independent_p_g_buckets_and_remove_grads(parameter, self._groups[index])

    def _collect(self, parameter: nn.Parameter, _: int | None = None) -> None:
        """Take this rank's range of a gradient that DeepSpeed has reduced."""
        fragment = self.fragment_of(parameter)
        if fragment is not None and parameter.grad is not None:
            flat = parameter.grad.reshape(-1)
            fragment.accumulate(flat.narrow(0, fragment.start, fragment.home.numel()))
        parameter.grad = None

    def finish(self) -> None:
        zero = self.zero
        # A backward inside of this one may have freed the buckets' memory.
        if any(bucket.params for bucket in zero.ipg_buckets.values()):
            zero.reduce_ipg_grads()
        self._wait_for_reductions()
        zero._clear_previous_reduced_grads()
        for parameter in self.floating.values():
            number = zero.get_param_id(parameter)
            if zero.params_already_reduced[number]:
                zero.params_already_reduced[number] = False
                self._collect(parameter)
        zero._release_ipg_buffers()
        self.wait_for_copies()

    def reset(self) -> None:
        zero = self.zero
        self._wait_for_reductions()
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        zero._release_ipg_buffers()

    def _wait_for_reductions(self) -> None:
        if self._stream is not None:
            accelerator().current_stream().wait_stream(self._stream)

    # -- weights ----------------------------------------------------------------------------------

    def take_homes(self) -> None:
        # A write in place reaches the home by itself, but p.data = average doesn't.
        for index, place in self._places.items():
            parameter = self.parameters[index]
            if parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter.data)
                parameter.data = place

    def gather(self) -> None:
        zero = self.zero
        library("deepspeed.runtime.utils").all_gather_dp_groups(
            groups_flat=zero.bit16_groups_flat,
            partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )

    def end(self, full: Sequence[torch.Tensor]) -> None:
        super().end(full)
        # DeepSpeed's objects hold the flat memory until a garbage collection.
        self._places.clear()
        self.zero.bit16_groups_flat.clear()
        self.zero.parallel_partitioned_bit16_groups.clear()
