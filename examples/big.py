"""Large language models without a forward pass, to predict their memory.

python -m accel memory examples.big:gpt_70b --ranks 1,2,4,8,64
"""

from torch import nn


class Block(nn.Module):
    def __init__(self, width, kv_width, hidden):
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)


class GPT(nn.Module):
    def __init__(self, num_tokens, width, kv_width, hidden, num_blocks):
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        self.blocks = nn.ModuleList(
            Block(width, kv_width, hidden) for _ in range(num_blocks)
        )
        self.norm = nn.RMSNorm(width)


def gpt_8b():
    return GPT(128256, 4096, 1024, 14336, 32)


def gpt_70b():
    return GPT(128256, 8192, 1024, 28672, 80)
