"""Resuming in the middle of an epoch: start it again after it was ended, also on another number of processes."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def main(args):
    accel.seed(0)
    x = torch.randn(128, 8)
    # 16 samples in a step, whatever the number of processes
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16 // accel.world_size(), shuffle=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    # With a seed the order of the samples is the same on any number of processes, also on one.
    model, optimizer, loader = accel.setup(model, optimizer, loader, loader_options=accel.LoaderOptions(seed=0))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    state |= {"step": 0, "loss": 0.0}
    last = accel.latest(args.out)
    if last is not None:
        accel.load(last, state)
        accel.print(f"resumed at step {state['step']}")
    while state["step"] < args.steps:
        for x, y in loader:  # the first time the rest of the epoch in which the checkpoint was made
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            state |= {"step": state["step"] + 1, "loss": accel.all_reduce(loss, "mean").item()}
            if state["step"] % 5 == 0 or state["step"] == args.steps:
                accel.save(state, f"{args.out}/step-{state['step']}", keep=2)
            if state["step"] == args.stop_at:
                return  # as if the job had been killed here
            if state["step"] == args.steps:
                break
    accel.print(f"step {state['step']}: loss {state['loss']:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stop-at", type=int, help="end before, to try it")
    parser.add_argument("--out", default="runs/resume")
    main(parser.parse_args())
