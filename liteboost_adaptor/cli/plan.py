"""``python -m liteboost_adaptor plan``: how a model would be sharded over processes, by its configuration."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import PlanError

_TITLES = {
    "sum": "layers whose outputs are added",
    "sum_output": "groups of experts whose outputs are added",
    "experts": "groups of experts, some of them in each process, whose outputs are added",
    "embedding": "embedding, added",
    "head": "head, put together",
    "norm": "norms over all heads, sums of squares added",
}
#: Numbers of cards up to this are drawn.
_PLOTTED = 16
#: Modules of which it is said why they stay whole; further ones are counted.
_NAMED = 8


def plan(
    model: Annotated[
        str, typer.Argument(help="folder of a model, or its name on the hub; only config.json is read")
    ],
    tp: Annotated[int, typer.Option("--tp", min=1, help="processes that share the weights")] = 1,
    dp: Annotated[int, typer.Option("--dp", min=1, help="replicas, as LITEBOOST_DP")] = 1,
    sp: Annotated[
        int, typer.Option("--sp", min=1, help="processes that share a prompt's tokens, as LITEBOOST_SP")
    ] = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, help="the same, as LITEBOOST_CP")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON: the figures, and the plan itself")
    ] = False,
    ep: Annotated[
        bool, typer.Option("--ep", help="whole experts for each process, as LITEBOOST_EP=1")
    ] = False,
    device: Annotated[str, typer.Option(help="card each process has: 910B, 910B-280T or 910C")] = "910B",
    context: Annotated[int, typer.Option(help="tokens of each sequence")] = 4096,
    batch: Annotated[int, typer.Option(help="sequences")] = 1,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code that lies beside config.json")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="draw memory and modelled tokens/s over the number of cards"),
    ] = None,
) -> None:
    """Say what each of several processes would hold and exchange.

    Where there cannot be so many, it says why. Memory is that of a card of --device for --batch sequences of
    --context tokens; times are modelled, not measured. There are --tp times --dp times --sp times --cp
    processes. Exit status 1 where so many cannot share the model.
    """
    from ..bench import planned
    from ..bench.sharing import Sharing
    from ..parallel.tensor import layout, quantized
    from ..parallel.tensor.plan_summary import summary
    from .bench import check_outputs

    check_outputs(None, plot, None)
    sharing = Sharing(dp, sp, cp)
    if tp * sharing.processes == 1:
        raise typer.BadParameter("nothing is shared by one process; give --tp, --dp, --sp or --cp")
    built = _on_meta(model, trust_remote_code)
    weights = quantized.weights_of(built)
    with quantized.as_plain(built):
        found = layout.infer_layout(built, quantized.granularities_of(weights))
    how = found.plan(tp, ep)
    reason = quantized.why_not(weights, how)
    if reason:
        raise PlanError(f"{how.model} is loaded whole by every process: {reason}")
    title = f"{how.model}, {str(built.dtype).removeprefix('torch.')}, {batch} x {context} tokens, {device}"
    figures = summary(built, how) | {"world_sizes": quantized.world_sizes(built, found, ep)}
    figures["shared"] = _shared(built, found, tp, sharing, context, batch)
    try:
        several = planned.over(built, found, device, context, batch, max(tp, _PLOTTED), ep, sharing)
    except (AttributeError, KeyError, TypeError) as fault:  # a configuration of a form that is not known
        figures["card"] = None
        title = f"{title}: memory and time are not known ({str(fault).splitlines()[0]})"
    else:
        card = planned.planned(built, how, found, device, context, batch, sharing)
        figures["card"] = dataclasses.asdict(card) | {
            "device_name": device,
            "context": context,
            "fits": card.fits,
            "fits_from": next((each.cards for each in several if each.fits), 0),
            "tokens_s": card.tokens_s,
            "captured_tokens_s": card.captured_tokens_s,
            "modelled": True,
        }
        if plot is not None:
            planned.plot(several, f"{title}; times are modelled", plot)
    if as_json:
        sys.stdout.write(json.dumps(figures | {"plan": json.loads(how.to_json())}) + "\n")
    else:
        sys.stdout.write(_text(how, figures, title))


def _shared(
    model: Any, layout: Any, tp: int, sharing: Any, context: int, batch: int
) -> dict[str, float] | None:
    """What is shared beside the weights and exchanged for it; None where nothing is."""
    from ..bench.sharing import exchanged

    if sharing.processes == 1:
        return None
    sizes = {**dataclasses.asdict(sharing), "rows": sharing.rows(batch), "tokens": sharing.tokens(context)}
    if sharing.of_tokens == 1:
        return sizes
    layers = model.config.get_text_config().num_hidden_layers
    one = exchanged(model, layout, tp, sharing, context, sharing.rows(batch))
    return sizes | {
        "prompt_bytes": layers * (one.heads + (sharing.cp - 1) * one.passed),
        "token_bytes": layers * one.joined,
    }


def _on_meta(name: str, trust_remote_code: bool) -> Any:
    """The model of a configuration, with integers where there will be some."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..checkpoint.folders import malformed, why_unreadable
    from ..quantization.model import quantize_on_meta

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=config.dtype or torch.float32, trust_remote_code=trust_remote_code
            )
    except malformed() as fault:
        raise typer.BadParameter(why_unreadable(name, fault, trust_remote_code)) from fault
    wanted = _quantization(config)
    if wanted is not None:
        quantize_on_meta(model, wanted)
    return model


def _quantization(config: Any) -> Any:
    """What a model becomes as it is loaded: what its checkpoint says, else ``LITEBOOST_QUANT``; or None."""
    from .. import config as settings
    from ..quantization.config import LiteBoostConfig, of_settings
    from ..quantization.identifiers import QUANT_METHOD

    said = getattr(config, "quantization_config", None)
    if said is None:
        asked = settings.settings().quant
        return of_settings(asked) if asked is not None else None
    said = said if isinstance(said, dict) else said.to_dict()
    method = said.get("quant_method")
    if method != QUANT_METHOD:
        raise PlanError(
            f"its weights are quantized as {method} says, and plan counts those of {QUANT_METHOD} only; load "
            "and save it once, which writes such a checkpoint, and plan that"
        )
    return LiteBoostConfig(**said)


def _text(how: Any, figures: dict[str, Any], title: str) -> str:
    weights = figures["weights"]
    shared = figures["shared"] or {"dp": 1, "sp": 1, "cp": 1}
    lines = [
        f"{how.model} over {how.world_size * shared['dp'] * shared['sp'] * shared['cp']} processes",
        f"  weights a process: {_bytes(max(weights))} of {_bytes(figures['all_weights'])}, "
        f"{_bytes(figures['repeated'])} of them the same in every process",
        f"  exchanged a token: {_bytes(figures['exchanged'])} from each process, in "
        f"{sum(figures['exchanges'].values())} exchanges",
    ]
    lines += [f"    {count} {_TITLES[role]}" for role, count in figures["exchanges"].items()]
    lines += _of_sharing(figures["shared"])
    lines += _of_card(figures["card"], title)
    lines.append(
        f"  numbers of processes that can share the weights: {', '.join(map(str, figures['world_sizes']))}"
    )
    if how.replicated:
        lines.append("  recognised, and whole in every process:")
        lines += [f"    {name}: {reason}" for name, reason in list(how.replicated.items())[:_NAMED]]
        if len(how.replicated) > _NAMED:
            lines.append(f"    and {len(how.replicated) - _NAMED} more")
    return "\n".join(lines) + "\n"


def _of_sharing(shared: dict[str, Any] | None) -> list[str]:
    if shared is None:
        return []
    lines = []
    if shared["dp"] > 1:
        lines.append(f"  {shared['dp']} replicas, each with {shared['rows']} of the sequences at most")
    if "prompt_bytes" in shared:
        lines.append(
            f"  {shared['sp'] * shared['cp']} processes share the tokens of a prompt (LITEBOOST_SP="
            f"{shared['sp']}, LITEBOOST_CP={shared['cp']}), {shared['tokens']} each at most; attention "
            f"exchanges {_bytes(shared['prompt_bytes'])} from each for a prompt, "
            f"{_bytes(shared['token_bytes'])} for a later token"
        )
    return lines


def _of_card(card: dict[str, Any] | None, title: str) -> list[str]:
    if card is None:
        return [f"  {title}"]
    enough = card["fits_from"]
    needed = card["weights"] + card["cache"] + card["activations"]
    fits = "fits" if card["fits"] else "does not fit"
    from_on = f"fits from {enough} cards on" if enough else "fits on no number of cards that was tried"
    return [
        f"  {title}:",
        f"    memory a card: {_bytes(needed)}: weights {_bytes(card['weights'])}, keys and values "
        f"{_bytes(card['cache'])}, activations of the prompt about {_bytes(card['activations'])}; "
        f"{fits} {_bytes(card['usable'])}" + ("" if card["fits"] else f"; {from_on}"),
        f"    modelled, not measured: prompt {card['prefill'] * 1e3:.3g} ms; {card['tokens_s']:.3g} tokens/s "
        f"launched by the host, {card['captured_tokens_s']:.3g} from a captured graph, "
        f"{card['exchanging'] / card['device']:.0%} of the card's time in exchanges",
    ]


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
