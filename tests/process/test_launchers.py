"""The variables of every launcher; pure, with made-up environments."""

from __future__ import annotations

import pytest

from accel.errors import AccelError
from accel.process.launchers import ALONE, Place, detect, first_host

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


def numbers(place: Place) -> tuple[int, int, int, int]:
    return place.rank, place.world_size, place.local_rank, place.local_world_size


def test_no_launcher_is_a_world_of_one() -> None:
    assert detect({}) == ALONE
    assert numbers(ALONE) == (0, 1, 0, 1)
    assert detect({"MASTER_ADDR": "host0", "LOCAL_RANK": "0"}) == ALONE


def test_torchrun() -> None:
    place = detect(TORCHRUN)
    assert place == Place(
        launcher="torchrun",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="host0",
        master_port=29500,
    )


def test_kubeflow_pytorchjob_has_one_process_per_pod() -> None:
    environ = {k: v for k, v in TORCHRUN.items() if not k.startswith("LOCAL")}
    assert numbers(detect(environ)) == (3, 4, 0, 1)


def test_a_local_rank_without_a_local_size_may_share_its_host_with_all() -> None:
    environ = {k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}
    assert numbers(detect(environ)) == (3, 4, 1, 4)


def test_slurm() -> None:
    place = detect(SLURM)
    assert (place.launcher, *numbers(place)) == ("SLURM", 5, 7, 1, 2)
    assert place.master_addr == "node01"
    assert place.master_port is not None
    assert 15000 <= place.master_port < 25000


def test_slurm_port_is_the_same_for_all_ranks_and_another_in_another_step() -> None:
    first = detect(SLURM).master_port
    assert detect(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).master_port == first
    assert detect(SLURM | {"SLURM_STEP_ID": "1"}).master_port != first
    assert detect(SLURM | {"SLURM_JOB_ID": "4712"}).master_port != first


def test_variables_set_by_hand_win_over_derived_ones() -> None:
    place = detect(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345", "WORLD_SIZE": "7"})
    assert (place.launcher, place.master_addr, place.master_port) == ("SLURM", "10.0.0.1", 12345)


def test_the_last_node_of_slurm_has_fewer_tasks() -> None:
    environ = SLURM | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    assert numbers(detect(environ)) == (6, 7, 0, 1)


def test_slurm_outside_srun_is_one_process() -> None:
    assert detect(SLURM | {"SLURM_JOB_NAME": "bash", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) == ALONE
    assert detect({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}) == ALONE
    with pytest.raises(AccelError, match="SLURM_JOB_NAME"):
        detect(SLURM | {"SLURM_JOB_NAME": "bash"})


def test_node_lists() -> None:
    for nodes, first in (
        ("node[01-03,7],other", "node01"),
        ("a1,b[2-3],c", "a1"),
        ("rack[1-2]n[08-09].lan", "rack1n08.lan"),
        ("single", "single"),
    ):
        assert first_host(nodes) == first


def test_openmpi_on_one_host() -> None:
    place = detect(OPENMPI)
    assert (place.launcher, *numbers(place), place.master_addr) == ("OpenMPI", 1, 2, 1, 2, "127.0.0.1")
    assert place.master_port == detect(OPENMPI | {"OMPI_COMM_WORLD_RANK": "0"}).master_port is not None


def test_mpirun_inside_slurm_is_mpi() -> None:
    assert detect(SLURM | OPENMPI | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).launcher == "OpenMPI"


def test_mpich() -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    place = detect(environ)
    # hydra gives no name of the job that all ranks share, so no port can be derived.
    assert (place.launcher, *numbers(place)) == ("MPICH", 1, 2, 1, 2)
    assert (place.master_addr, place.master_port) == ("127.0.0.1", None)


def test_srun_with_pmi2_is_slurm() -> None:
    assert detect(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}).launcher == "SLURM"


def test_horovodrun() -> None:
    environ = {
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.1.1.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "40321",
    }
    place = detect(environ)
    assert (place.launcher, *numbers(place), place.master_addr) == ("horovodrun", 2, 4, 0, 2, "10.1.1.1")
    assert place.master_port not in (None, 40321)


CONTRADICTIONS: list[tuple[dict[str, str], str]] = [
    ({"RANK": "0"}, "WORLD_SIZE"),
    ({"WORLD_SIZE": "2"}, "RANK is not set"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
    ({k: v for k, v in SLURM.items() if k != "SLURM_NTASKS"}, "SLURM_NTASKS"),
    ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, "LOCAL_RANK"),
    (TORCHRUN | {"RANK": "4"}, "RANK=4.*WORLD_SIZE=4"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2.*LOCAL_WORLD_SIZE=2"),
    (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
]


def test_contradictions_name_the_variables() -> None:
    for environ, named in CONTRADICTIONS:
        with pytest.raises(AccelError, match=named):
            detect(environ)
