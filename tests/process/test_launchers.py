"""The variables of every launcher, with made-up environments."""

from __future__ import annotations

from typing import Any

import pytest

from accel.errors import AccelError
from accel.process.launchers import Place, detect, first_host

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[01-03,7]",
    "SLURM_JOB_NODELIST": "login,node[01-03,7]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2130247681",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
HOROVODRUN = {
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.1.1.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "40321",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


#: The launcher, rank, world size, local rank, local world size and address of rank 0.
PLACES: dict[str, tuple[dict[str, str], tuple[Any, ...]]] = {
    "torchrun": (TORCHRUN, ("torchrun", 3, 4, 1, 2, "host0")),
    "a process per pod": (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("torchrun", 3, 4, 0, 1, "host0")),
    "no local size": (without(TORCHRUN, "LOCAL_WORLD_SIZE"), ("torchrun", 3, 4, 1, 4, "host0")),
    "slurm": (SLURM, ("SLURM", 5, 7, 1, 2, "node01")),
    "last node of slurm": (
        SLURM | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
        ("SLURM", 6, 7, 0, 1, "node01"),
    ),
    "address by hand": (SLURM | {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "7"}, ("SLURM", 5, 7, 1, 2, "10.0.0.1")),
    "openmpi": (OPENMPI, ("OpenMPI", 1, 2, 1, 2, "127.0.0.1")),
    "mpirun in slurm": (
        SLURM | OPENMPI | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        ("OpenMPI", 1, 2, 1, 2, "127.0.0.1"),
    ),
    "mpich": (MPICH, ("MPICH", 1, 2, 1, 2, "127.0.0.1")),
    "srun with pmi2": (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}, ("SLURM", 5, 7, 1, 2, "node01")),
    "horovodrun": (HOROVODRUN, ("horovodrun", 2, 4, 0, 2, "10.1.1.1")),
}


@pytest.mark.parametrize("name", PLACES)
def test_place_of_launcher(name: str) -> None:
    environ, expected = PLACES[name]
    place = detect(environ)
    sizes = (place.rank, place.world_size, place.local_rank, place.local_world_size)
    assert (place.launcher, *sizes, place.master_addr) == expected


def test_no_launcher() -> None:
    assert Place() == detect({})
    # A shell of an allocation, or a batch script, is not a rank.
    shell = SLURM | {"SLURM_JOB_NAME": "bash", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for environ in ({"MASTER_ADDR": "host0", "LOCAL_RANK": "0"}, shell, without(SLURM, "SLURM_STEP_ID")):
        assert detect(environ) == Place()


def test_ports() -> None:
    port = detect(SLURM).master_port
    assert port is not None
    assert 15000 <= port < 25000
    assert detect(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).master_port == port
    assert port not in (detect(SLURM | {name: "9"}).master_port for name in ("SLURM_STEP_ID", "SLURM_JOB_ID"))
    assert detect(OPENMPI).master_port == detect(OPENMPI | {"OMPI_COMM_WORLD_RANK": "0"}).master_port is not None
    assert detect(HOROVODRUN).master_port not in (None, 40321)
    assert (detect(TORCHRUN).master_port, detect(SLURM | {"MASTER_PORT": "12345"}).master_port) == (29500, 12345)
    assert detect(MPICH).master_port is None  # hydra gives no name of the job that all ranks share


def test_node_lists() -> None:
    for nodes, first in (
        ("node[01-03,7],other", "node01"),
        ("a1,b[2-3],c", "a1"),
        ("rack[1-2]n[08-09].lan", "rack1n08.lan"),
        ("single", "single"),
    ):
        assert first_host(nodes) == first


CONTRADICTIONS: list[tuple[dict[str, str], str]] = [
    ({"RANK": "0"}, "WORLD_SIZE"),
    ({"WORLD_SIZE": "2"}, "RANK must be an integer, but is not set"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
    (without(SLURM, "SLURM_NTASKS"), "SLURM_NTASKS"),
    (SLURM | {"SLURM_JOB_NAME": "bash"}, "SLURM_JOB_NAME"),
    (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK"),
    (TORCHRUN | {"RANK": "4"}, "RANK=4.*WORLD_SIZE=4"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2.*LOCAL_WORLD_SIZE=2"),
    (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT must be an integer, but is http"),
]


def test_contradictions_name_the_variables() -> None:
    for environ, named in CONTRADICTIONS:
        with pytest.raises(AccelError, match=named):
            detect(environ)
