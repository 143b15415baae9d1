"""What scripts do to a model on one rank only, or on each in another way."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parallel.jobs import _quiet, _raised
from parallel.jobs_kinds import generated
from parallel.jobs_load import PLAN, class_of
from safetensors.torch import load_file
from support import tiny_models
from torch import nn
from transformers import AutoModelForCausalLM

import liteboost_adaptor
from liteboost_adaptor.errors import ParallelError
from liteboost_adaptor.parallel.runtime import groups


def _hook_on_one(model: Any, rank: int) -> None:
    if rank:
        model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)


def _hook_of_another_strength(model: Any, rank: int) -> None:
    strength = 1.0 + rank
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * strength)


def _hook_inside(model: Any, rank: int) -> None:
    shift = torch.full((1,), 0.5 * rank)
    model.model.layers[1].mlp.act_fn.register_forward_pre_hook(lambda module, args: (args[0] + shift,))


def _forward_on_one(model: Any, rank: int) -> None:
    norm = model.model.layers[1].input_layernorm
    if rank:
        norm.forward = lambda states: states * 2


def _constant(model: Any, rank: int) -> None:
    model.model.layers[0].self_attn.scaling = 0.1 * (rank + 1)


def _norm(model: Any, rank: int) -> None:
    model.model.norm.weight.data *= torch.linspace(1, 1 + 4 * rank, model.config.hidden_size)


def _module(model: Any, rank: int) -> None:
    if rank:
        model.model.layers[0].mlp.act_fn = nn.Tanh()


def _the_same(model: Any, rank: int) -> None:
    strength, seen = 1.5, [0]
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * strength)
    model.model.norm.register_forward_hook(lambda *_: seen.__setitem__(0, seen[0] + 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.03)
    _constant(model, 1)


CHANGES = {
    change.__name__[1:]: change
    for change in (
        _hook_on_one,
        _hook_of_another_strength,
        _hook_inside,
        _forward_on_one,
        _constant,
        _norm,
        _module,
        _the_same,
    )
}


def changed(folder: str, name: str, rank: int | None = None) -> dict[str, Any]:
    """Texts before and after the change that a rank makes, and how often the ranks were said to part."""
    _quiet()
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = generated(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        CHANGES[name](model, int(os.environ["RANK"]) if rank is None else rank)
        texts = [generated(model), generated(model, 1)]
    parted = sum("the model was changed since it was loaded" in str(each.message) for each in said)
    return {"before": before, "texts": texts, "parted": parted}


def _data_of_a_shard(model: Any, rank: int) -> None:
    if rank:
        model.model.layers[0].mlp.up_proj.weight.data.mul_(2)


def _buffer(model: Any, rank: int) -> None:
    if rank:
        model.model.rotary_emb.inv_freq.mul_(2)


def refused(folder: str) -> dict[str, str]:
    """What is said of changes on one rank where the ranks were asked to share the model."""
    _quiet()
    rank, found = int(os.environ["RANK"]), {}
    for change in (_hook_on_one, _norm, _data_of_a_shard, _buffer):
        model = AutoModelForCausalLM.from_pretrained(folder)
        generated(model)
        change(model, rank)
        found[change.__name__] = _raised(lambda: generated(model))  # noqa: B023
    return found


@torch.no_grad()
def images(folder: str) -> dict[str, Any]:
    """Logits of an image of this rank's own, and whether the ranks have parted for it."""
    _quiet()
    model = class_of(folder).from_pretrained(folder).eval()
    was_sharded = hasattr(model, PLAN)
    own = torch.load(f"{folder}/images.pt", weights_only=True)[int(os.environ["RANK"])]
    return {
        "was sharded": was_sharded,
        "logits": model(pixel_values=own[None]).logits[0].tolist(),
        "parted": not hasattr(model, PLAN),
    }


@torch.no_grad()
def parts(folder: str, rank: int | None = None) -> dict[str, Any]:
    """What the models in a model compute, called by themselves, each for a text of this rank's own."""
    _quiet()
    rank = int(os.environ["RANK"]) if rank is None else rank
    found: dict[str, Any] = {}
    for which in (0, rank):  # the same, then its own
        model = class_of(folder).from_pretrained(folder).eval()
        ids = torch.arange(5, 17)[None] + which
        encoder = model.get_encoder()
        states = encoder(input_ids=ids).last_hidden_state
        decoded = model.get_decoder()(input_ids=ids[:, :4], encoder_hidden_states=states).last_hidden_state
        found[f"values {which}"] = torch.cat([states.flatten(), decoded.flatten()]).tolist()
        found[f"parted {which}"] = not hasattr(model, PLAN)
    return found


@torch.no_grad()
def heads_and_parts(folder: str) -> dict[str, Any]:
    """Attention weights of a forward and of ``generate``, and what is saved of a model in a model."""
    _quiet()
    ids, own = (
        torch.arange(5, 17)[None],
        Path(folder) / f"saved {os.environ['RANK']} {os.environ['WORLD_SIZE']}",
    )
    found: dict[str, Any] = {}

    def load() -> Any:
        groups.divergence.reason = ""  # as if it was the first model of a script
        return class_of(folder).from_pretrained(folder, attn_implementation="eager").eval()

    def note(name: str, compute: Callable[[Any], Any]) -> None:
        model = load()
        was_sharded = hasattr(model, PLAN)
        try:
            values = compute(model)
            found[name] = (was_sharded, hasattr(model, PLAN), values)
        except ParallelError as fault:
            found[name] = (was_sharded, str(fault))

    note("forward", lambda model: model(input_ids=ids, output_attentions=True).attentions[1].tolist())
    settings = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    note("generate", lambda model: model.generate(ids, **settings).attentions[1][0].tolist())
    note("saved", lambda model: _shapes(model.model, own))
    return found


def _shapes(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    file = folder / "model.safetensors"  # transformers writes it on rank 0
    return {name: list(each.shape) for name, each in load_file(file).items()} if file.exists() else {}


def _layer(model: Any) -> Any:
    return (model.model if hasattr(model, "model") else model.gpt_neox).layers[0]


def _attention(model: Any) -> Any:
    layer = _layer(model)
    return getattr(layer, "self_attn", None) or layer.attention


def _read(module: Any, found: list[torch.Tensor]) -> None:
    module.register_forward_hook(lambda module, args, output: found.append(_first(output).clone()))


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _ablate(module: Any) -> None:
    module.register_forward_hook(
        lambda module, args, output: (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0
    )


def _set_bias(mlp: Any) -> None:
    """As a script shifts the states of a layer: to be added once."""
    down = getattr(mlp, "fc2", None) or mlp.dense_4h_to_h
    down.bias = nn.Parameter(torch.full((down.weight.shape[0],), 0.3))


class _Nothing(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(states)


#: What a script does to attention or MLP of a layer where both lie beside each other.
BESIDE = {
    "read attention": lambda model, found: _read(_attention(model), found),
    "read mlp": lambda model, found: _read(_layer(model).mlp, found),
    "ablate attention": lambda model, found: _ablate(_attention(model)),
    "ablate mlp": lambda model, found: _ablate(_layer(model).mlp),
    "forward of its own": lambda model, found: setattr(_layer(model).mlp, "forward", torch.zeros_like),
    "a bias": lambda model, found: _set_bias(_layer(model).mlp),
    "another mlp": lambda model, found: setattr(_layer(model), "mlp", _Nothing()),
}


@torch.no_grad()
def beside(names: list[str], is_sharded: bool) -> dict[str, Any]:
    """Logits, and what hooks were given, of each model under each of `BESIDE`, the same on every rank."""
    _quiet()
    found = {}
    for name in names:
        for change, apply in BESIDE.items():
            model = tiny_models.build(name)
            if is_sharded:
                liteboost_adaptor.shard(model)
            seen: list[torch.Tensor] = []
            apply(model, seen)
            logits = model(input_ids=torch.arange(5, 17)[None]).logits
            found[f"{name}: {change}"] = torch.cat([logits.flatten(), *map(torch.flatten, seen)]).tolist()
    return found


def adapted(folder: str) -> dict[str, Any]:
    """A model that PEFT wraps: its logits, and a step of training."""
    from peft import LoraConfig, get_peft_model

    _quiet()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    was_sharded = hasattr(model, PLAN)
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    try:
        wrapped = get_peft_model(model, config)
    except ParallelError as fault:
        return {"was sharded": was_sharded, "refused": str(fault)}
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        logits = wrapped.eval()(input_ids=ids).logits
    loss = wrapped.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = [p.grad.norm().item() for p in wrapped.parameters() if p.grad is not None]
    return {"was sharded": was_sharded, "logits": logits.flatten().tolist(), "gradients": gradients}
