"""Tracking by TensorBoard and Weights & Biases (offline): rank 0 writes what is the mean over all processes."""

import argparse
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def trackers(folder, ends):
    """A function of a step and its values for each tracker that is installed; on rank 0 alone."""
    if not accel.is_main():
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("TensorBoard is not installed: pip install tensorboard")
    else:
        writer = ends.enter_context(SummaryWriter(str(folder / "tensorboard")))
        yield lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()]
    try:
        import wandb
    except ImportError:
        print("Weights & Biases is not installed: pip install wandb")
    else:
        run = ends.enter_context(wandb.init(project="by_feature", dir=folder, mode="offline"))
        yield lambda step, values: run.log(values, step=step)


def main(args):
    accel.seed(0)
    x = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-2)
    model, optimizer, loader = accel.setup(net, optimizer, loader)
    losses = []
    with ExitStack() as ends:
        logs = list(trackers(args.out, ends))
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(accel.all_reduce(loss, "mean").item())  # on all processes; only the writing is rank 0's
                for log in logs:
                    log(len(losses), {"loss": losses[-1], "lr": optimizer.param_groups[0]["lr"]})
    accel.print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, by {len(logs)} trackers in {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tracking"))
    main(parser.parse_args())
