"""accel inside Ray's TorchTrainer, with real Ray where it is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from examples import ray_train
from tests.distributed import run
from tests.programs import clean_environ

EXAMPLE = Path(ray_train.__file__)


def in_a_group_of_others() -> tuple[float, bool]:
    loss = ray_train.train({"epochs": 2})
    return loss, dist.is_initialized()


def test_the_loop_uses_a_group_that_is_there_and_leaves_it() -> None:
    ((alone, _),) = run(1, in_a_group_of_others)
    for loss, lives_on in run(2, in_a_group_of_others):
        assert loss == pytest.approx(alone, abs=1e-5)
        assert lives_on


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")
def test_ray_trains_one_model_on_two_workers(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--epochs", "2", "--storage", str(tmp_path)]
    environ = clean_environ() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    result = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=240, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.search(r"epoch 2: loss ([\d.]+) on (\d) workers", result.stdout + result.stderr)
    assert found, result.stdout + result.stderr
    ((alone, _),) = run(1, in_a_group_of_others)
    assert found[2] == "2"
    assert float(found[1]) == pytest.approx(alone, abs=1e-5)
