"""LoRA by peft: the base is frozen, small adapters are trained, and only they are saved."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel

try:
    from peft import LoraConfig, get_peft_model
except ImportError:
    raise SystemExit("lora.py needs peft: pip install peft") from None


def build():
    torch.manual_seed(0)  # the base that everybody downloads
    base = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return get_peft_model(base, LoraConfig(r=2, lora_alpha=8, target_modules=["0", "2"], modules_to_save=["4"]))


def is_trained(name):
    return "lora_" in name or "modules_to_save" in name


def main(args):
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model, optimizer, loader = accel.setup(model, optimizer, loader)

    losses = []
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(accel.all_reduce(loss, "mean").item())
    accel.print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")

    full = accel.full_state_dict(model)  # every rank calls it, and one writes peft's own format
    if accel.is_main():
        accel.unwrap(model).save_pretrained(f"{args.out}/adapter", state_dict=full)

    accel.save({"model": model}, f"{args.out}/checkpoint", filter=is_trained)
    fresh = accel.setup(build()).model
    accel.load(f"{args.out}/checkpoint", {"model": fresh}, strict=False)  # the base is not in it
    with torch.no_grad():
        accel.print(f"difference after loading {(fresh(x) - model(x)).abs().max().item():.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/lora")
    main(parser.parse_args())
