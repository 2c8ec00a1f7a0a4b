"""Common programs with other libraries: peft's adapters of a classifier, and a quantized base from torchao."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.distributed import refusals, run
from tests.models import logged, rows


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_labels=2, pad_token_id=0, num_key_value_heads=2, **sizes)
    return LlamaForSequenceClassification(config)


def classifier() -> Any:
    """Return a small Llama for classification with LoRA; peft trains the new head as a whole (modules_to_save)."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_llama(), LoraConfig(task_type="SEQ_CLS", r=2))


def save_adapter(backend: str, out: Path) -> dict[str, torch.Tensor]:
    net = classifier()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, _ = accel.setup(net, optimizer, backend=backend)
    model(input_ids=torch.arange(1, 17).view(2, 8), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    state = accel.full_state_dict(model)
    if accel.is_main():
        accel.unwrap(model).save_pretrained(out, state_dict=state)
    accel.barrier()
    return state


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", "deepspeed:3"])
def test_peft_saves_adapter_and_head(backend: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state, _ = run(2, save_adapter, backend, tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    trained = {name: value for name, value in state.items() if "lora_" in name or "modules_to_save" in name}
    assert len(written) == len(trained) == 5
    for name, value in trained.items():
        name = name.replace(".default", "").replace("modules_to_save.", "")
        torch.testing.assert_close(written[name], value, rtol=0, atol=0)


class Adapted(nn.Module):
    """A frozen layer beside a trained low-rank one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def train_on_int8(backend: str) -> dict[str, torch.Tensor]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(accel.rank())  # rank 0's weights count, codes and scales included
    base = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    quantize_(base, Int8WeightOnlyConfig())
    base.requires_grad_(False)
    net = nn.Sequential(Adapted(base[0]), base[1], Adapted(base[2]))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, _ = accel.setup(net, optimizer, backend=backend)
    x, y = rows(5, 8, 17)[accel.rank() :: accel.world_size()].split([16, 1], 1)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    tensors = net.named_parameters()
    return {name: p.detach().dequantize() if p.dim() > 1 and "base" in name else p.detach() for name, p in tensors}


@pytest.mark.parametrize("backend", ["ddp", "sharded"])
def test_adapters_train_on_an_int8_base(backend: str) -> None:
    pytest.importorskip("torchao")
    (expected,) = run(1, train_on_int8, "single")
    for state in run(2, train_on_int8, backend):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed:1", "deepspeed:3"])
def test_an_int8_base_cannot_be_sharded(backend: str) -> None:
    pytest.importorskip("torchao")
    for text in refusals(2, train_on_int8, backend, error="BackendError"):
        assert "quantized parameter 0.base.weight" in text
        assert '"ddp"' in text


def schedule_early(world_batches: int, scheduled: bool) -> list[str]:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(world_batches * 4, 2), batch_size=4)
    if scheduled:
        torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(loader))
    with logged() as texts:
        accel.setup(net, optimizer, [loader, loader])
    return [text for text in texts if "scheduler" in text]


def test_a_scheduler_before_setup_warns() -> None:
    warned, quiet = run(2, schedule_early, 6, True)
    assert len(warned) == 1
    assert "from 6 to 3 batches, but a learning rate scheduler already exists" in warned[0]
    assert quiet == []
    assert run(2, schedule_early, 6, False) == [[], []]


def defer_from_pretrained(directory: Path) -> None:
    from transformers import LlamaForSequenceClassification

    with accel.deferred_init():
        net = LlamaForSequenceClassification.from_pretrained(directory)
    accel.setup(net)


def test_deferred_from_pretrained_raises(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    for text in refusals(2, defer_from_pretrained, tmp_path, error="BackendError"):
        assert "accel.deferred_init(weights=directory)" in text
