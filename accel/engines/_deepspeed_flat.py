"""Stages 1 and 2 of DeepSpeed: flat memory that every rank holds, of which each steps an equal part."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from ._deepspeed_library import library
from ._deepspeed_partitions import Partitions


@final
class Flat(Partitions):
    """Stages 1 and 2: every rank holds all weights, in flat memory, and owns an equal part of it."""

    def __init__(self, stage: int, *args: Any) -> None:
        super().__init__(*args)
        self.eager = stage == 2
        self._groups: dict[int, int] = {}
        #: Each parameter's place in the flat memory.
        self._places: dict[int, torch.Tensor] = {}

    def arrange(self) -> None:
        """A fragment for each parameter that reaches into this rank's part."""
        zero = self.zero
        for hook in zero._grad_acc_hooks:
            hook.remove()
        zero._grad_acc_hooks.clear()
        for g, parameters in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[g])
            first = size * dist.get_rank(zero.real_dp_process_group[g])
            for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[g], strict=True):
                index = self.numbers[id(parameter)]
                self._groups[index] = g
                self._places[index] = parameter.data
                start, end = max(offset, first), min(offset + parameter.numel(), first + size)
                if start < end:
                    self.own(index, start - offset, zero.bit16_groups_flat[g].narrow(0, start, end - start))
            # The library's copy of the weights, and views of it: the fragments have their own, where they need one.
            zero.single_partition_of_fp32_groups[g].data = torch.empty(0)
            for parameter in parameters:
                parameter._hp_mapping = None
        zero.copy_grads_in_partition = self._collect
        buckets = zero.ipg_buckets
        zero.reduce_ipg_grads = self.announced(
            zero.reduce_ipg_grads,
            lambda comm_dtype=None: tuple(
                (str(dtype), *(number for *_, number in bucket.params))
                for dtype, bucket in buckets.items()
                if bucket.params and comm_dtype in (None, dtype)
            ),
        )

    @torch.no_grad()
    def take_edits(self) -> list[int]:
        """The module has whole weights, to write or to replace as in one process."""
        lost = []
        for index, place in self._places.items():
            parameter = self.parameters[index]
            if parameter.data_ptr() == place.data_ptr():
                continue
            if parameter.shape == place.shape and parameter.dtype is place.dtype:  # another tensor was put there
                place.copy_(parameter.data)
                parameter.data = place
            else:
                lost.append(index)
        for fragment in self.fragments.values():
            if fragment.weights.data_ptr() != fragment.home.data_ptr():
                written = fragment.home.to(fragment.weights.device)
                same = fragment.weights.to(written.dtype) == written  # there the copy keeps its own digits
                fragment.weights.copy_(torch.where(same, fragment.weights, written.to(fragment.weights.dtype)))
        return lost

    def offer(self, index: int) -> None:
        """Zeros where this rank has no gradient."""
        parameter = self.parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

    def take(self, index: int) -> None:
        """Into the library's bucket."""
        parameter = self.parameters[index]
        if parameter.numel():
            self.zero.setup_buckets()
            self.zero.reduce_independent_p_g_buckets_and_remove_grads(parameter, self._groups[index])

    def _collect(self, parameter: nn.Parameter, _: int | None = None) -> None:
        """The library has reduced a gradient of which this rank may own a part."""
        fragment = self.fragments.get(self.numbers[id(parameter)])
        if fragment is not None and parameter.grad is not None:
            fragment.accumulate(parameter.grad.reshape(-1).narrow(0, fragment.start, fragment.home.numel()))
        parameter.grad = None

    def finish(self) -> None:
        """Reduce what is in the bucket."""
        zero = self.zero
        zero.reduce_ipg_grads()
        if zero.overlap_comm:
            library("deepspeed.accelerator").get_accelerator().synchronize()
            zero._clear_previous_reduced_grads()
        for parameter in self.divided.values():
            number = zero.get_param_id(parameter)
            if zero.params_already_reduced[number]:
                zero.params_already_reduced[number] = False
                self._collect(parameter)
        zero._release_ipg_buffers()

    def reset(self) -> None:
        """Empty the bucket."""
        super().reset()
        zero = self.zero
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        zero._release_ipg_buffers()

    def gather(self) -> None:
        """All ranks' parts of the flat memory."""
        zero = self.zero
        library("deepspeed.runtime.utils").all_gather_dp_groups(
            groups_flat=zero.bit16_groups_flat,
            partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )
