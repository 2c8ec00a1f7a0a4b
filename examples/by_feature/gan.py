"""Train a GAN: call setup once per model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def main():
    accel.seed(0)
    data = TensorDataset(2 + 0.5 * torch.randn(512, 2))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(
        nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
    )
    g_optimizer = torch.optim.Adam(
        generator.parameters(), lr=2e-3, betas=(0.5, 0.9)
    )
    c_optimizer = torch.optim.Adam(
        critic.parameters(), lr=2e-3, betas=(0.5, 0.9)
    )
    generator, g_optimizer, loader = accel.setup(
        generator, g_optimizer, loader
    )
    critic, c_optimizer, _ = accel.setup(critic, c_optimizer)

    accel.seed(1, per_rank=True)  # different noise on each rank
    distances = []
    for _ in range(20):
        for (real,) in loader:
            noise = torch.randn(len(real), 4, device=real.device)
            fake = generator(noise)

            c_optimizer.zero_grad()
            scores = critic(torch.cat([real, fake.detach()]))
            real_score, fake_score = scores.chunk(2)
            real_loss = F.softplus(-real_score).mean()
            c_loss = real_loss + F.softplus(fake_score).mean()
            c_loss.backward()
            c_optimizer.step()

            # The generator's loss needs no gradients for the critic.
            critic.requires_grad_(False)
            g_optimizer.zero_grad()
            g_loss = F.softplus(-critic(fake)).mean()
            g_loss.backward()
            g_optimizer.step()
            critic.requires_grad_(True)
        center = accel.all_reduce(fake.detach().mean(0), "mean")
        distances.append((center - 2).norm().item())
    accel.print(
        f"distance from the data {distances[0]:.3f} to {distances[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
