"""Resume in the middle of an epoch, with any number of processes."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def main(args):
    accel.seed(0)
    x = torch.randn(128, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    # Each step uses the same samples for any number of processes.
    options = accel.LoaderOptions(split_batches=True, seed=0)
    model, optimizer, loader = accel.setup(
        model, optimizer, loader, loader_options=options
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, args.steps
    )

    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "step": 0,
        "loss": 0.0,
    }
    last = accel.latest(args.out)
    if last is not None:
        accel.load(last, state)
        accel.print(f"resumed at step {state['step']}")
    while state["step"] < args.steps:
        for x, y in loader:  # after load: the rest of the interrupted epoch
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            state["step"] += 1
            state["loss"] = accel.all_reduce(loss.detach(), "mean").item()
            if state["step"] % 5 == 0 or state["step"] == args.steps:
                accel.save(state, f"{args.out}/step-{state['step']}", keep=2)
            if state["step"] == args.stop_at:
                return
            if state["step"] == args.steps:
                break
    accel.print(f"step {state['step']}: loss {state['loss']:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--stop-at", type=int, help="stop early, as if the job was killed"
    )
    parser.add_argument("--out", default="runs/resume")
    main(parser.parse_args())
