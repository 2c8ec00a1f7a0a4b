"""Train with Ray's TorchTrainer. accel uses Ray's process group."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel

GLOBAL_BATCH = 64


def train(config):
    accel.seed(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 8, generator=generator)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, GLOBAL_BATCH // accel.world_size())

    model, optimizer, loader = accel.setup(model, optimizer, loader)

    for epoch in range(1, config["epochs"] + 1):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        loss = accel.all_reduce(loss.detach(), "mean").item()
        accel.print(
            f"epoch {epoch}: loss {loss:.6f} on {accel.world_size()} workers"
        )
        if "report" in config:
            config["report"]({"loss": loss})
    accel.teardown()  # doesn't destroy Ray's process group
    return loss


def main(args):
    from ray import train as ray_train
    from ray.train.torch import TorchTrainer

    use_gpu = torch.cuda.is_available()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs, "report": ray_train.report},
        scaling_config=ray_train.ScalingConfig(
            num_workers=args.workers, use_gpu=use_gpu
        ),
        run_config=ray_train.RunConfig(
            storage_path=os.path.abspath(args.storage)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--storage", default="runs/ray", help="directory for Ray's reports"
    )
    main(parser.parse_args())
