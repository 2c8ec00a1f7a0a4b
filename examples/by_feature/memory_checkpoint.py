"""Save to memory often and to disk rarely: after a crash the job resumes from the newer of the two checkpoints."""

import argparse
import shutil

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def newest(*roots):
    """Return the checkpoint with the highest step of all directories, or None."""
    paths = [path for root in roots if (path := accel.latest(root)) is not None]
    return max(paths, key=lambda path: int(path.rpartition("-")[2]), default=None)


def main(args):
    accel.seed(0)
    x = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16 // accel.world_size(), shuffle=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    model, optimizer, loader = accel.setup(model, optimizer, loader, loader_options=accel.LoaderOptions(seed=0))

    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0, "loss": 0.0}
    last = newest(args.memory, args.out)
    if last is not None:
        accel.load(last, state)
        accel.print(f"resumed from {last}")
    while state["step"] < args.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            state |= {"step": state["step"] + 1, "loss": accel.all_reduce(loss, "mean").item()}
            to_disk = state["step"] % 10 == 0 or state["step"] == args.steps
            accel.save(state, f"{args.out if to_disk else args.memory}/step-{state['step']}", keep=1)
            if state["step"] in (args.stop_at, args.steps):
                break
        if state["step"] == args.stop_at:
            return  # as if the job had been killed here
    accel.print(f"step {state['step']}: loss {state['loss']:.6f}")
    if accel.is_main():
        shutil.rmtree(args.memory, ignore_errors=True)  # files in /dev/shm take memory until you remove them


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stop-at", type=int, help="end before, to try it")
    parser.add_argument("--memory", default="/dev/shm/run", help="a directory in memory")
    parser.add_argument("--out", default="runs/memory_checkpoint", help="a directory on disk")
    main(parser.parse_args())
