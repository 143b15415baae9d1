"""Every causal-LM family of the transformers imported: ``python -m support.version_smoke``.

Prints one JSON object: the version; families that cannot be built or run as tiny models, with why; families
whose logits or greedy tokens differ with us, with how; rows that failed; families by kinds of calls served.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import transformers

import liteboost_adaptor

from . import calls, numbers, state, tiny_models

TOLERANCE = 2e-5
STEPS = 4


def try_family(family: str, found: dict[str, Any]) -> None:
    """Run one family without and with us, prefill of a padded batch and cached decode; note what differs."""
    try:
        model = tiny_models.build(family)
        inputs = tiny_models.example_inputs(model, padding=3)
        expected = logits(model, inputs)
        assert torch.isfinite(expected).all(), "its own logits are not finite"
    except Exception as fault:  # noqa: BLE001 - of the original, whatever it is
        found["not_run"][family] = f"{type(fault).__name__}: {fault}".splitlines()[0]
        return
    greedy = tokens(model, inputs)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        error = numbers.relative(logits(model, inputs), expected)
        if error > TOLERANCE:
            found["wrong"][family] = f"logits differ by {error:.1e}"
        if greedy is not None:
            sure = numbers.certain(greedy, 2 * TOLERANCE * greedy.logits.abs().max().item())
            if not torch.equal(tokens(model, inputs).tokens[sure], greedy.tokens[sure]):
                found["wrong"][family] = "greedy tokens differ"
    found["failed"] += [f"{family}: {row.id}: {row.reason}" for row in state.rows().get("failed", [])]
    for kind, count in served.kinds.items():
        if count:
            found["served"].setdefault(kind, []).append(family)
    liteboost_adaptor.undo()


@torch.no_grad()
def logits(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).logits


def tokens(model: torch.nn.Module, inputs: dict[str, Any]) -> numbers.Greedy | None:
    """A greedy continuation; None for a family that the original does not generate with here."""
    if not hasattr(model, "generate"):
        return None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            return numbers.greedy(model, inputs, steps=STEPS)
        except Exception:
            if liteboost_adaptor.status().models:  # else the original's own fault
                raise
            return None


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    liteboost_adaptor.undo()
    found: dict[str, Any] = {"version": transformers.__version__, "package": liteboost_adaptor.__file__}
    found |= {"not_run": {}, "wrong": {}, "failed": [], "served": {}}
    families = tiny_models.families()
    for family in families:
        try_family(family, found)
    found["run"] = len(families) - len(found["not_run"])
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
