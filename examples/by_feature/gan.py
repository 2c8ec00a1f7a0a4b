"""A GAN: two models, two engines, two optimizers, in the loop that one would write for one process."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def main():
    accel.seed(0)
    real_data = TensorDataset(2 + 0.5 * torch.randn(512, 2))
    loader = DataLoader(real_data, batch_size=32, shuffle=True)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    generator, generator_optimizer, loader = accel.setup(generator, generator_optimizer, loader)
    critic, critic_optimizer, _ = accel.setup(critic, critic_optimizer)

    accel.seed(1, per_rank=True)  # each process draws noise of its own
    distances = []
    for _ in range(20):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), 4, device=real.device))
            critic_optimizer.zero_grad()
            scores = critic(torch.cat([real, fake.detach()]))  # one forward for both
            real_score, fake_score = scores.chunk(2)
            (F.softplus(-real_score).mean() + F.softplus(fake_score).mean()).backward()
            critic_optimizer.step()

            critic.requires_grad_(False)  # the generator's loss only passes through
            generator_optimizer.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            generator_optimizer.step()
            critic.requires_grad_(True)
        center = accel.all_reduce(fake.detach().mean(0), "mean")
        distances.append((center - 2).norm().item())
    accel.print(f"distance from the center of the data {distances[0]:.3f} to {distances[-1]:.3f}")


if __name__ == "__main__":
    main()
