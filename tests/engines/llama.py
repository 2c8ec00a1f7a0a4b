"""Small models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def build(kind: str = "LlamaForCausalLM", length: int = 32, **options: Any) -> Any:
    """Return a model with grouped heads, of 32 words, without dropout."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": length}
    model = getattr(transformers, kind)
    torch.manual_seed(0)
    return model(model.config_class(**sizes, **heads, pad_token_id=0, **options)).eval()
