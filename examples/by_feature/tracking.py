"""Log to TensorBoard, and to Weights & Biases if it is installed."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import accel

try:
    import wandb
except ImportError:
    wandb = None


def main(args):
    accel.seed(0)
    x = torch.randn(128, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-2)
    model, optimizer, loader = accel.setup(net, optimizer, loader)

    if accel.is_main():
        writer = SummaryWriter(args.out / "tensorboard")
        if wandb:
            run = wandb.init(project="accel", dir=args.out, mode="offline")

    losses = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            # Every rank must call all_reduce. Only rank 0 writes.
            losses.append(accel.all_reduce(loss.detach(), "mean").item())
            if accel.is_main():
                writer.add_scalar("loss", losses[-1], len(losses))
                if wandb:
                    run.log({"loss": losses[-1]}, step=len(losses))

    if accel.is_main():
        writer.close()
        if wandb:
            run.finish()
    accel.print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tracking"))
    main(parser.parse_args())
