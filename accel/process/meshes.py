"""Meshes: the ranks in rows and columns, in which an engine divides a model along one axis and repeats it along another."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import Process


def mesh_of(process: Process, axes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks with these axes, by name and length, the last of which neighbours lie along.

    Collective where it is a new one: the process groups of a mesh live as long as accel's other groups do.
    """
    assert math.prod(axes.values()) == process.place.world_size
    assert process.group is not None
    kind = process.device.type
    if len(axes) == 1:
        return DeviceMesh.from_group(process.group, kind, mesh_dim_names=tuple(axes))
    ranks = torch.arange(process.place.world_size, device="cpu").view(*axes.values())
    groups = []
    for axis, name in enumerate(axes):
        lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        if (key := str(lines)) not in process.subgroups:
            what = f"accel {name}"
            process.subgroups[key], _ = dist.new_subgroups_by_enumeration(
                lines, timeout=process.timeout, group_desc=what
            )
        groups.append(process.subgroups[key])
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=tuple(axes))
