"""The notebook of the examples runs from top to bottom, and shows what it promises."""

from __future__ import annotations

import base64
import os
import re
from typing import Any

import pytest

from tests.interpreters import executable
from tests.programs import ROOT

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The executed code cells."""
    import nbformat

    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    path = str(tmp_path_factory.mktemp("notebook"))
    # With pytest's variable the kernel would not read what its child processes print.
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "IPYTHONDIR": f"{path}/ipython"}
    environment["PYTHON_EXEC"] = executable()
    client = nbclient.NotebookClient(
        notebook, timeout=240, startup_timeout=240, kernel_name="python3", resources={"metadata": {"path": path}}
    )
    # Sockets that are files: a port that is free now may be taken when the kernel opens it.
    client.create_kernel_manager()
    client.km.transport = "ipc"
    client.km.connection_file = f"{path}/kernel.json"
    client.km.kernel_spec.argv[0] = executable()
    client.execute(env=environment)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def streams(cell: Any, name: str) -> list[str]:
    return [output.text for output in cell.outputs if output.output_type == "stream" and output.name == name]


@pytest.mark.parametrize(("index", "title"), [(1, "dp"), (2, "launch")])
def test_a_way_to_train(cells: list[Any], index: int, title: str) -> None:
    cell = cells[index]
    text = "".join(streams(cell, "stdout"))
    found = re.fullmatch(rf"{title}: accuracy (0\.\d+) on 357 test images\n", text)
    assert found is not None, text
    assert float(found[1]) > 0.9
    pictures = [o.data["image/png"] for o in cell.outputs if o.output_type == "display_data"]
    assert len(pictures) == 1
    assert base64.b64decode(pictures[0])[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(pictures[0]) > 5000
    progress = streams(cell, "stderr")
    assert "270/270" in "".join(progress)
    # It came while the cell ran, not as a whole in the end.
    assert len([part for part in progress if "it/s" in part]) > 1


def test_dp_says_that_it_has_one_device(cells: list[Any]) -> None:
    import torch

    told = "runs as 'single'" in "".join(streams(cells[1], "stderr"))
    assert told == (torch.accelerator.device_count() < 2)


def test_the_memory_that_it_would_take(cells: list[Any]) -> None:
    (line,) = streams(cells[3], "stdout")
    ddp, fsdp = map(int, re.findall(r"(\d+) (?:bytes )?with", line))
    assert ddp > 6 * fsdp
    (picture,) = [o.data["image/png"] for o in cells[3].outputs if o.output_type == "execute_result"]
    assert base64.b64decode(picture)[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_checkpoint_goes_on_with_another_backend(cells: list[Any]) -> None:
    accuracies = [float(re.findall(r"accuracy (0\.\d+)", "".join(streams(cells[i], "stdout")))[0]) for i in (2, 4)]
    assert accuracies[1] >= accuracies[0]
    assert "resumed: accuracy" in "".join(streams(cells[4], "stdout"))


def test_an_interrupt_ends_well(cells: list[Any]) -> None:
    assert streams(cells[5], "stdout") == ["interrupted; the model is as it was: True\n"]


def test_a_failure_is_raised_in_the_cell(cells: list[Any]) -> None:
    text = "".join(streams(cells[6], "stdout"))
    assert "rank 1 of 2 in accel.launch(fail) raised" in text
    assert "the cause: ValueError('a batch of the wrong shape')" in text
