"""What ZeRO cannot do is refused, and changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from accel.engines.deepspeed.library import library
from tests.distributed import run
from tests.engines.deepspeed.training import Net, adamw, momentum, zero


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


def what_torch_does_in_evaluation() -> None:
    """Its encoder makes nested tensors, and looks whether query, key and value are one."""
    torch.manual_seed(0)
    raw, x, padding = Encoder().eval(), torch.randn(2, 3, 4), torch.tensor([[False, False, True]] * 2)
    linear = nn.functional.linear
    with torch.no_grad():
        expected = raw(x, padding)
    model, optimizer, _ = accel.setup(raw, momentum(raw), backend=zero(3))
    with torch.no_grad():  # at padded positions, torch's encoder gives 0 or not
        assert torch.allclose(model(x, padding)[~padding], expected[~padding], atol=1e-6)
    model.encoder.layers[0].linear1.weight.register_hook(lambda _: optimizer.step())
    with pytest.raises(accel.BackendError, match="an optimizer steps inside a backward"):
        model.train()(x, padding).sum().backward()
    optimizer.zero_grad()
    accel.teardown(model)
    assert nn.functional.linear is linear


def test_encoders_in_evaluation() -> None:
    run(2, what_torch_does_in_evaluation)


CONTRADICTIONS: list[tuple[Any, dict[str, Any], str]] = [
    ({"optimizer": {"type": "Adam"}}, {}, "'optimizer' is .*Give accel.setup the optimizer"),
    ({"fp16": {"enabled": True}}, {}, "'fp16' is .*precision="),
    ({"curriculum_learning": {"enabled": True}}, {}, "'curriculum_learning' is .*accel doesn't use it"),
    ({"gradient_accumulation_steps": 4}, {}, "'gradient_accumulation_steps' is 4"),
    ({"bf16": {"enabled": True}}, {}, "precision='bf16-true'"),
    ({"zero_optimization": {"stage": 1}}, {"stage": 2}, "zero_optimization.stage"),
    ({"zero_optimization": {"stage": 0}}, {}, "'stage' is 0. .*backend='ddp'"),
    ({}, {"stage": 2, "offload_parameters": True}, "Use stage=3"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, {}, "Use {'device': 'cpu'}"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, {}, "zero_quantized_weights"),
]


def contradictions() -> None:
    for config, options, text in CONTRADICTIONS:
        raw = Net()
        optimizer = adamw(raw)
        with pytest.raises(accel.AccelError, match=text):
            accel.setup(raw, optimizer, backend=DeepSpeed(config=config, **options))
        assert "zero_grad" not in vars(optimizer)
        assert "zero_grad" not in vars(raw)


def test_contradictions() -> None:
    run(2, contradictions)


def divided_by_the_library() -> None:
    accel.setup(raw := Net(), adamw(raw), backend=zero(3))  # it has its process groups now
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with library().zero.Init(config_dict_or_path=config):
        divided = nn.Linear(4, 2)
    for backend in ("ddp", zero(2), zero(3)):
        with pytest.raises(accel.BackendError, match="weight is already sharded"):
            accel.setup(divided, momentum(divided), backend=backend)


def test_models_that_deepspeed_has_divided() -> None:
    run(2, divided_by_the_library)


def alone() -> None:
    for options, precision in (
        ({"stage": 3, "offload_parameters": True}, "32-true"),
        ({"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}, "32-true"),
        ({"config": {"bf16": {"enabled": True}}}, "bf16-true"),
    ):
        raw = Net()
        with pytest.raises(accel.BackendError, match="at least 2 ranks"):
            accel.setup(raw, adamw(raw), backend=DeepSpeed(**options), precision=precision)


def test_options_of_one_process() -> None:
    run(1, alone)


class Extra(nn.Module):
    def __init__(self, extra: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=dtype))
        self.extra = nn.Parameter(extra)


#: Models that DeepSpeed can't shard.
INDIVISIBLE: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Embedding(4, 2, sparse=True), "Use sparse=False"),
    (lambda: Extra(torch.ones(2, dtype=torch.complex64)), "can't shard extra"),
    (lambda: Extra(torch.ones(0)), "can't shard extra"),
    (lambda: Extra(torch.ones(2), torch.float64), "can't shard weight .torch.float64"),
    (lambda: Extra(torch.ones(2, dtype=torch.bfloat16)), "weight is torch.float32, extra is torch.bfloat16"),
]


def indivisible() -> None:
    for build, text in INDIVISIBLE:
        for stage in (2, 3):
            raw = build()
            with pytest.raises(accel.BackendError, match=text):
                accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=zero(stage))


def test_models_that_cannot_be_sharded() -> None:
    run(2, indivisible)


def never_dropped(stage: int) -> list[str]:
    net = nn.Linear(4, 2)
    model, optimizer, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), backend=zero(stage))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(handler)
    try:
        for drop in (True, False, False):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if drop:
                model.zero_grad()
                assert not told
            for p in net.parameters():
                p.grad = None
    finally:
        logging.getLogger("accel").removeHandler(handler)
    return told


def test_warning_of_gradients_never_dropped() -> None:
    for told in run(2, never_dropped, 2):
        assert len(told) == 1
        assert "Call optimizer.zero_grad()" in told[0]
