"""Distances, oracles and greedy decoding with margins."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from . import tiny_models

#: Unit in the last place over the value, at its smallest (for values just below a power of two).
ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Parameters and buffers in ``dtype``, rotary frequencies in fp32, as ``from_pretrained`` does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and "inv_freq" not in name:
            buffer.data = buffer.data.to(dtype)
    return model


def oracle(model: torch.nn.Module, family: str) -> torch.nn.Module:
    """The same weights in float64 with eager attention and eager experts; nothing of ours serves it."""
    chosen = {"attn_implementation": "eager"}
    if importlib.util.find_spec("transformers.integrations.moe"):  # transformers 4.57 knows but one kind
        chosen["experts_implementation"] = "eager"
    twin = tiny_models.build(family, **chosen)
    twin.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    return twin.double()


def padded_inputs(
    model: torch.nn.Module, paddings: tuple[int, ...] = (0, 3, 6), length: int = 13, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A batch whose rows are padded at the left by so many positions."""
    inputs = tiny_models.example_inputs(model, batch=len(paddings), length=length, seed=seed)
    for row, padding in enumerate(paddings):
        inputs["attention_mask"][row, :padding] = 0
    return inputs


@dataclass
class Greedy:
    """Tokens and logits of a greedy continuation, ``[batch, steps]`` and ``[batch, steps, vocabulary]``."""

    tokens: torch.Tensor
    logits: torch.Tensor

    @property
    def margins(self) -> torch.Tensor:
        """Distance between the best and the second-best logit, ``[batch, steps]``."""
        best = self.logits.float().topk(2, dim=-1).values
        return best[..., 0] - best[..., 1]


@torch.no_grad()
def greedy(model: torch.nn.Module, inputs: dict[str, Any], steps: int = 8, **settings: Any) -> Greedy:
    """``generate`` with a cache, whatever the family's generation defaults are."""
    out = model.generate(
        **inputs,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    return Greedy(out.sequences[:, -steps:], torch.stack(out.logits, dim=1))


@torch.no_grad()
def prefill_and_steps(model: torch.nn.Module) -> torch.Tensor:
    """Logits of a prefill and, where the family has a cache, of two decode steps after it."""
    inputs = tiny_models.example_inputs(model, batch=2, length=9)
    out = model(**inputs, use_cache=True)
    found = [out.logits]
    for step in range(2):
        token = torch.full((2, 1), 7 + step)
        mask = torch.ones(2, 10 + step, dtype=torch.long)
        out = model(input_ids=token, attention_mask=mask, past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    return torch.cat(found, dim=1)


def certain(reference: Greedy, tolerance: float) -> torch.Tensor:
    """Positions whose token does not depend on differences below ``tolerance``, nor anything before it."""
    return (reference.margins > tolerance).long().cumprod(dim=-1).bool()


@dataclass
class Exact:
    """What the oracle says of a padded batch: logits, and router margins (ones where there is no router)."""

    logits: torch.Tensor
    margins: torch.Tensor


@torch.no_grad()
def exact(model: torch.nn.Module, family: str, inputs: dict[str, torch.Tensor]) -> Exact:
    """Logits in float64 and, for each position, the smallest relative router margin up to it.

    A row at a time and without its padding: eager attention in float64 makes NaN of a row that is
    masked throughout, because it takes the mask's smallest number through fp32.
    """
    reference = oracle(model, family)
    noted: list[torch.Tensor] = []
    top_k = getattr(model.config, "num_experts_per_tok", None)
    for part in reference.modules():
        if "Router" in type(part).__name__:
            part.register_forward_hook(lambda router, args, _: noted.append(_margins(router, args[0], top_k)))
    batch, length = inputs["input_ids"].shape
    logits = torch.zeros(batch, length, reference.config.vocab_size, dtype=torch.float64)
    margins = torch.ones(batch, length, dtype=torch.float64)
    for row in range(batch):
        start = length - int(inputs["attention_mask"][row].sum())
        ids, positions = inputs["input_ids"][row : row + 1, start:], torch.arange(start, length)[None]
        noted.clear()
        logits[row, start:] = reference(input_ids=ids, position_ids=positions).logits[0]
        if noted:
            # One other expert is another function, there and (by attention) at every later position.
            margins[row, start:] = torch.stack(noted).amin(dim=0).cummin(dim=0).values
    return Exact(logits, margins)


def _margins(router: torch.nn.Module, hidden_states: torch.Tensor, top_k: int) -> torch.Tensor:
    """Distance between the last expert chosen and the first one not, over the largest router logit."""
    logits = torch.nn.functional.linear(hidden_states, router.weight, router.bias)
    ranked = logits.reshape(-1, logits.shape[-1]).sort(dim=-1, descending=True).values
    return (ranked[:, top_k - 1] - ranked[:, top_k]) / logits.abs().amax()
