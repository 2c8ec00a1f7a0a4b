"""The ranks as a mesh: copies of the model, its shards, and parts of its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

from ...errors import BackendError
from ...process import Process
from ...process.startup import mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The axes in their order, and the names that they may have in a mesh of the user's.
AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "replicate": ("replicate", "dp_replicate"),
    "shard": ("shard", "dp_shard", "fsdp", "dp"),
    "tensor": ("tensor", "tp"),
}


def check_size(name: str, size: object, option: str = "tensor_parallel") -> None:
    """Refuse (BackendError) what is no number of ranks."""
    if type(size) is not int or size < 1:
        raise BackendError(f"{name}({option}={size!r}): expected a number of ranks that have parts of each layer")


def check_mesh(options: Any) -> None:
    """Refuse (BackendError) a mesh that says something else than the other options, or nothing that is known."""
    mesh = options.mesh
    if mesh is None:
        return
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise BackendError(f"mesh={mesh!r}: expected a torch.distributed.DeviceMesh with mesh_dim_names")
    roles = [role for name in names for role, known in AXES.items() if name in known]
    if len(roles) < len(names) or len(set(roles)) < len(roles) or roles != sorted(roles, key=list(AXES).index):
        raise BackendError(
            f"mesh with the axes {', '.join(map(repr, names))}: expected, in this order, some of "
            + "; ".join(f"{role!r} (or {', '.join(map(repr, known[1:]))})" for role, known in AXES.items())
        )
    if "shard" not in roles:
        raise BackendError(
            f"mesh with the axes {', '.join(map(repr, names))}: expected one to divide along, named 'shard'"
        )
    for option, role in (("replicas", "replicate"), ("tensor_parallel", "tensor")):
        if getattr(options, option) != 1:
            raise BackendError(f"{option} and mesh exclude each other: the mesh's axis {role!r} says it")


def axes_of(options: Any, world_size: int) -> dict[str, int]:
    """The length of each axis, 1 in one process; BackendError where the processes do not divide so."""
    if world_size == 1:
        return dict.fromkeys(AXES, 1)
    if options.mesh is not None:
        sizes = dict(zip(options.mesh.mesh_dim_names, options.mesh.shape, strict=True))
        found = {role: math.prod(sizes.get(name, 1) for name in known) for role, known in AXES.items()}
        if options.mesh.mesh.flatten().tolist() != list(range(world_size)):
            raise BackendError(
                f"{options.mesh!r}: expected one of the ranks 0 to {world_size - 1}, in this order, as init_device_mesh makes it"
            )
        return found
    return options.axes(world_size)  # type: ignore[no-any-return]


def data_place(options: Any, process: Process) -> tuple[int, int]:
    """This rank's place among those that have batches of their own, and how many these are. Local."""
    sizes = axes_of(options, process.place.world_size)
    return process.place.rank // sizes["tensor"], sizes["replicate"] * sizes["shard"]


@final
class Mesh:
    """The mesh of an engine, made by accel or given by the user. Collective where it is a new one."""

    def __init__(self, options: Any, process: Process) -> None:
        self.sizes = axes_of(options, process.place.world_size)
        self.whole: DeviceMesh = options.mesh
        if options.mesh is None:
            # What has one rank is no axis, but that along which FSDP2 divides.
            self.whole = mesh_of(process, {role: n for role, n in self.sizes.items() if n > 1 or role == "shard"})
        names = self.whole.mesh_dim_names
        assert names is not None
        #: Of the axes that it has, as it calls them.
        self.names = {role: n for n in names for role, known in AXES.items() if n.partition(" ")[0] in known}
        place: Any = self.whole.get_coordinate()
        #: This rank's place along each axis.
        self.place = {role: place[names.index(self.names[role])] if role in self.names else 0 for role in AXES}

    def copies(self, tensor: Any) -> list[str]:
        """The axes along which all ranks have the same of a tensor."""
        placements = getattr(tensor, "placements", ())  # none of a plain one
        names = tensor.device_mesh.mesh_dim_names if placements else ()
        divided = {name for name, placement in zip(names, placements, strict=True) if not placement.is_replicate()}
        return [axis for axis in AXES if self.names.get(axis) not in divided]

    @property
    def data(self) -> DeviceMesh:
        """That of the ranks that a layer's part is divided over, with the copies of it."""
        return (
            self.whole[tuple(n for role, n in self.names.items() if role != "tensor")] if self.parallel else self.whole
        )

    @property
    def tensor(self) -> DeviceMesh:
        return self.whole[self.names["tensor"]]

    @property
    def parallel(self) -> bool:
        return "tensor" in self.names
