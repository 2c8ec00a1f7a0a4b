"""``accel.export``, and loading from directories of weights alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import accel
from accel import CheckpointError
from tests.checkpoint.helpers import differences, flipped, shard_of
from tests.distributed import run


class Tied(nn.Module):
    """Two tied names, two dtypes, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.rest = nn.Parameter(torch.randn(5).bfloat16(), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def saved(path: Path) -> tuple[str, Tied]:
    model = Tied()
    accel.save({"model": model}, path)
    return str(path), model


def equal(model: nn.Module, other: nn.Module) -> bool:
    return not differences(model.state_dict(), other.state_dict())


def export_on_ranks(directory: str, out: str) -> None:
    torch.manual_seed(0)
    accel.save({"model": accel.setup(Tied(), backend="fsdp").model}, directory)
    accel.export(directory, out)
    with pytest.raises(CheckpointError, match="does not exist"):
        accel.export(f"{directory}-1", out)


def test_a_file_that_safetensors_opens(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(2, export_on_ranks, str(tmp_path / "c"), str(out))
    torch.manual_seed(0)
    state = Tied().state_dict()
    del state["head.weight"]
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert not differences(dict(state), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    assert os.listdir(out) == ["model.safetensors"]


def test_several_files_with_an_index(tmp_path: Path) -> None:
    directory, model = saved(tmp_path / "c")
    out = tmp_path / "out"
    accel.export(directory, out, max_shard_size=200, dtype="float16")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) == 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    for name, tensor in model.state_dict().items():
        if name != "head.weight":
            assert torch.equal(found[name], tensor.half() if tensor.is_floating_point() else tensor)
    for size in ("1KB", "1KiB", "0.5MB", 1):
        accel.export(directory, out, max_shard_size=size, overwrite=True)
    with pytest.raises(CheckpointError, match="expected a number of bytes"):
        accel.export(directory, out, max_shard_size="5 bananas", overwrite=True)


def test_which_model(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 3)
    accel.save({"gan": {"a/b": first}, "critic": second, "step": 1}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"2 models \('gan/a%2Fb', 'critic'\). Choose with name="):
        accel.export(tmp_path / "c", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no model 'x' \\('gan"):
        accel.export(tmp_path / "c", tmp_path / "out", name="x")
    assert not (tmp_path / "out").exists()
    accel.export(tmp_path / "c", tmp_path / "out", name="gan/a%2Fb")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["weight"], first.weight)


def test_weights_are_replaced_whole(tmp_path: Path) -> None:
    directory, _ = saved(tmp_path / "c")
    other, model = saved(tmp_path / "d")
    out = tmp_path / "out"
    accel.export(directory, out, max_shard_size=200)
    (out / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has weights already"):
        accel.export(other, out)
    accel.export(other, out, overwrite=True)
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
    before = (out / "model.safetensors").read_bytes()
    shard = shard_of(Path(directory))
    shard.write_bytes(flipped(shard.read_bytes(), -3))
    with pytest.raises(CheckpointError, match="is damaged"):
        accel.export(directory, out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert equal(accel.load(out, {"model": Tied()})["model"], model)


def test_differences_are_listed(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2, dtype=torch.float64), "more": torch.zeros(1)}
    save_file(state, tmp_path / "model.safetensors")
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        accel.load(tmp_path, {"nets": {"x": model}, "epoch": 3})
    for part in ("[2, 3] in the checkpoint, [2, 2] here", "torch.float64 in the checkpoint", "more", "epoch"):
        assert part in str(caught.value)
    assert torch.equal(model.weight, before)
    assert accel.load(tmp_path) == {}
    with pytest.raises(CheckpointError, match="the state has 2"):
        accel.load(tmp_path, {"a": model, "b": nn.Linear(1, 1)})


def test_tied_weights_have_any_name(tmp_path: Path) -> None:
    model = Tied()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    without_first = {n: t for n, t in state.items() if n != "embed.weight"}
    with_other = {**state, "head.weight": state["head.weight"] + 1}
    for stored in (state, without_first, with_other):  # the first name counts
        save_file(stored, tmp_path / "model.safetensors")
        assert equal(accel.load(tmp_path, {"model": Tied()})["model"], model)


def test_indices_and_links(tmp_path: Path) -> None:
    """The cache of the Hugging Face hub consists of links."""
    source, path, blob = nn.Linear(2, 2), tmp_path / "model.safetensors", tmp_path / "0123"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}))

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            accel.load(tmp_path, {"model": nn.Linear(2, 2)})

    refused("No such file or directory: .*a.safetensors")
    save_file(dict(source.state_dict()), blob)
    (tmp_path / "a.safetensors").symlink_to(blob)
    assert equal(accel.load(tmp_path, {"model": nn.Linear(2, 2)})["model"], source)
    index.write_text("{}")
    path.symlink_to("0123")
    assert equal(accel.load(tmp_path, {"model": nn.Linear(2, 2)})["model"], source)
    os.truncate(blob, 5)
    refused("not a complete safetensors file")


@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_transformers_loads_it(tmp_path: Path, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with tied embeddings: ``from_pretrained`` gives the same logits, and accel loads its files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    accel.save({"model": model}, tmp_path / "c")
    out = tmp_path / "out"
    accel.export(tmp_path / "c", out, max_shard_size=size)
    config.save_pretrained(out)
    tokens = torch.arange(12)[None]
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    torch.manual_seed(1)
    again = transformers.GPT2LMHeadModel(config).eval()
    accel.load(tmp_path / "theirs", {"model": again})
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_diffusers_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    diffusers = pytest.importorskip("diffusers")

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        return diffusers.UNet2DModel(8, 1, 1, layers_per_block=1, block_out_channels=(32, 32), **blocks)

    model = build(0)
    accel.save({"unet": model}, tmp_path / "c")
    accel.export(tmp_path / "c", tmp_path / "unet", max_shard_size="200KB", library="diffusers")
    model.save_config(tmp_path / "unet")
    loaded, info = type(model).from_pretrained(tmp_path / "unet", output_loading_info=True, low_cpu_mem_usage=False)
    assert not any(info.values())
    assert equal(loaded, model)
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    assert equal(accel.load(tmp_path / "theirs", {"unet": build(1)})["unet"], model)
