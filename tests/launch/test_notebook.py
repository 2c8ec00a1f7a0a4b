"""The notebook of the examples runs from top to bottom, and shows what it promises."""

from __future__ import annotations

import base64
import os
import re
from typing import Any

import pytest
import torch

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


def printed(cell: Any, name: str = "stdout") -> str:
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == name)


def picture(cell: Any, kind: str) -> bytes:
    (content,) = [o.data["image/png"] for o in cell.outputs if o.output_type == kind]
    assert base64.b64decode(content)[:8] == b"\x89PNG\r\n\x1a\n"
    return content  # type: ignore[no-any-return]


def accuracy(cell: Any) -> float:
    return float(re.findall(r"accuracy (0\.\d+) on 357 test images\n", printed(cell))[0])


def test_ways_to_train(cells: list[Any]) -> None:
    for cell, title in ((cells[1], "dp"), (cells[2], "launch")):
        assert printed(cell).startswith(f"{title}: accuracy")
        assert accuracy(cell) > 0.9
        assert len(picture(cell, "display_data")) > 5000
        assert "270/270" in printed(cell, "stderr")
        # It came while the cell ran, not as a whole in the end.
        assert len([o for o in cell.outputs if o.output_type == "stream" and "it/s" in o.text]) > 1
    told = "runs as 'single'" in printed(cells[1], "stderr")
    assert told == (torch.accelerator.device_count() < 2)


def test_memory_and_checkpoint(cells: list[Any]) -> None:
    ddp, fsdp = map(int, re.findall(r"(\d+) (?:bytes )?with", printed(cells[3])))
    assert ddp > 6 * fsdp
    picture(cells[3], "execute_result")
    assert accuracy(cells[4]) >= accuracy(cells[2])
    assert printed(cells[4]).startswith("resumed: accuracy")


def test_interrupt_and_failure(cells: list[Any]) -> None:
    assert printed(cells[5]) == "interrupted, and the model is unchanged: True\n"
    assert "rank 1 of 2 in accel.launch(fail) raised" in printed(cells[6])
    assert "the cause: ValueError('a batch of the wrong shape')" in printed(cells[6])
