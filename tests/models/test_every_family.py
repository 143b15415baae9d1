"""Every causal-LM and image-text family of transformers, whether or not a rule is meant for it.

A family is built once: what of it is served (docs/coverage.md), whether its numbers are the original's, and
a cell of the pairwise matrix (docs/family_matrix.tsv), of which the second tier computes and writes all.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator

import pytest
import torch
import transformers
from support import (
    coverage,
    coverage_table,
    families,
    families_images,
    families_matrix,
    numbers,
    state,
    tiny_models,
)
from support.families_matrix import WRONG

import liteboost_adaptor
from liteboost_adaptor.huggingface.runtime import load_catalogue
from liteboost_adaptor.report import report

TOLERANCE = 2e-5
CAUSAL = families.buildable()
SECTION_OF = {family: section for section in families.SECTIONS for family in families.buildable(section)}

#: Causal families whose decode steps are not run as programs.
UNRECORDED = {
    **dict.fromkeys(("blt", "cpmant", "openai-gpt", "xlm", "xlnet"), "a step takes all tokens again"),
    **dict.fromkeys(("reformer", "rwkv", "xlstm", "musicgen_melody"), "no cache of layers is handed in"),
    **dict.fromkeys(("dbrx", "jetmoe", "qwen4_exp", "qwen4_exp_text", "xmod"), "reads values"),
    **dict.fromkeys(("gemma3n_text", "roc_bert"), "decides by a value behind a write to what is kept"),
    "deepseek_v4": "what the cache keeps grows in a way of its own",
    "minimax": "the cache keeps a list",
    "musicgen": "draws random numbers",
    "prophetnet": "what is kept moves",
    "recurrent_gemma": "changes an attribute of the model",
}


def of(names: list[str]) -> pytest.MarkDecorator:
    """Run a test on these families, one after the other with the other tests of the same family."""
    return pytest.mark.parametrize("family", names, scope="module")


@pytest.fixture(scope="module")
def model(family: str) -> torch.nn.Module:
    """A tiny one of the family. Each test leaves it as it was, unserved."""
    return tiny_models.build(family)


@functools.cache
def page() -> dict[str, tuple[str, list[coverage_table.Line]]]:
    if coverage_table.version() != transformers.__version__:
        pytest.skip(
            f"docs/coverage.md is of transformers {coverage_table.version()}, not {transformers.__version__}"
        )
    return coverage_table.read()


@of(list(SECTION_OF))
def test_a_family_is_served_as_its_line_says(family: str, model: torch.nn.Module) -> None:
    written = {line.family: line for line in page()[SECTION_OF[family]][1]}
    assert family in written, "no line for this family; run `make coverage`"
    found = coverage.measure(family, model, families.text_run(model))
    assert str(coverage_table.line(found)) == str(written[family]), "if this is meant, run `make coverage`"
    for kind in ("norm", "rope", "attention", "linear"):
        assert found.calls[kind][0] == found.tallied.get(kind, 0), f"{kind}: no original ran, nor did ours"


@of(CAUSAL)
@pytest.mark.parametrize(
    "levels", [(0, 2), pytest.param((1,), marks=pytest.mark.full)], ids=["levels 0 and 2", "level 1"]
)
def test_fp32_logits_and_greedy_tokens_are_the_originals_at_every_level(
    family: str, model: torch.nn.Module, levels: tuple[int, ...]
) -> None:
    """Prefill, and eight cached steps of a left-padded batch of three; level 0 to the bit."""
    steps = report.counter("step.program")
    before = steps.calls
    plain, padded = families.inputs_of(model, 12, (0, 0)), families.inputs_of(model, 13, (0, 3, 6))
    check(model, plain, padded, 8, levels)
    assert (steps.calls > before) == (2 in levels and family not in UNRECORDED), steps.fallbacks


@of([name for name in families.buildable(families.IMAGE_TEXT) if name not in families.NEEDS_IMAGE])
def test_text_decoders_of_image_text_families_are_served_like_causal_models(model: torch.nn.Module) -> None:
    check(model, families.inputs_of(model, 12, (0, 0)), families.inputs_of(model, 13, (0, 3, 6)), 4, (2,))


@of(list(families_images.FAMILIES))
def test_logits_of_an_image_and_a_text_are_the_originals(model: torch.nn.Module) -> None:
    inputs = families_images.image_inputs(model)
    darker = inputs | {"pixel_values": inputs["pixel_values"] / 2}
    assert not torch.equal(families.prefill(model, inputs), families.prefill(model, darker)), "image not read"
    check(model, inputs, inputs, 4, (2,))


@of(CAUSAL)
def test_a_cell_of_a_family(family: str) -> None:
    """In fp32 or in 16 bits; neighbouring families have others."""
    result = families_matrix.run(families_matrix.sample(family, turn=CAUSAL.index(family)))
    assert result.verdict != WRONG, str(result)


@pytest.fixture(scope="module")
def whole_run() -> Iterator[dict[str, list[str]]]:
    """Lines of every family that was run; written to the file when none is missing."""
    lines: dict[str, list[str]] = {}
    yield lines
    if set(lines) == set(CAUSAL):
        families_matrix.write(lines)


@pytest.mark.full
@of(CAUSAL)
def test_every_cell_of_a_family(family: str, whole_run: dict[str, list[str]]) -> None:
    cells, refused = families_matrix.cells(family)
    results = [families_matrix.run(cell) for cell in cells]
    lines = [families_matrix.not_expressible(family, *refusal) for refusal in refused.items()]
    whole_run[family] = [*map(str, results), *lines]
    wrong = [str(result) for result in results if result.verdict == WRONG]
    assert not wrong, "\n".join(wrong)


def check(model: torch.nn.Module, plain: dict, padded: dict, count: int, levels: tuple[int, ...]) -> None:
    """Prefill of ``plain`` and ``count`` cached steps after ``padded`` are the original's at these levels."""
    expected = families.prefill(model, plain)
    tokens, steps = families.decode(model, padded, count)
    # Tokens are the original's unless two logits are nearer than the tolerance; what follows may differ then.
    certain = numbers.certain(numbers.Greedy(tokens, steps), 2 * TOLERANCE * steps.abs().max().item())
    for level in levels:
        liteboost_adaptor.apply(model, level=level)
        found = families.prefill(model, plain)
        greedy, found_steps = families.decode(model, padded, count)
        if not torch.equal(greedy, tokens):
            assert torch.equal(greedy[certain], tokens[certain]), f"level {level}"
            _, found_steps = families.decode(model, padded, count, forced=tokens)
        if level == 0:
            assert torch.equal(found, expected) and torch.equal(found_steps, steps)
        rows = state.rows()
        assert "failed" not in rows, [row.reason for row in rows["failed"]]
        assert numbers.relative(found, expected) <= TOLERANCE, f"prefill, level {level}"
        assert numbers.relative(found_steps, steps) <= TOLERANCE, f"cached decode, level {level}"
    liteboost_adaptor.undo()
    assert not any("__liteboost__" in vars(type(part)) for part in model.modules())
    assert torch.equal(families.prefill(model, plain), expected)


@pytest.mark.parametrize("name", sorted(families.NOT_BUILDABLE))
def test_families_left_out_cannot_be_built_or_run_on_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ["scipy", *(known for known in sys.modules if known.startswith("scipy."))]:
        monkeypatch.setitem(sys.modules, module, None)  # no requirement of ours; other tests may install it
    with pytest.raises(Exception):  # noqa: B017 - whatever each of them has against it
        model = tiny_models.build(name)
        families.text_run(model)()  # by `generate`, which needs no image of Kosmos-2
        families.prefill(model, families.inputs_of(model, 12, (0, 0)))


def test_the_design_covers_every_pair() -> None:
    factors = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0,)}
    rows = list(families_matrix.covering(factors))
    for a, b in itertools.combinations(factors, 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(factors[a], factors[b]))
    assert len(rows) < 3 * 2 * 2


def test_the_page_has_every_family_and_its_own_sums() -> None:
    for section, (sums, lines) in page().items():
        assert [line.family for line in lines] == families.buildable(section)
        assert coverage_table.totals(lines) == sums, "run `make coverage`"


#: Kinds of calls -> share of the causal families that have them to be served wholly.
GOALS = {
    ("norm",): 178 / 186,
    ("rope",): 120 / 130,
    ("attention",): 1.0,
    ("gated", "experts"): 0.9,
}


@pytest.mark.parametrize("kinds", GOALS, ids=" or ".join)
def test_nearly_all_families_are_served_wholly(kinds: tuple[str, ...]) -> None:
    having = [line for line in page()[families.CAUSAL][1] if line.has(*kinds)]
    assert len(having) > 100
    assert sum(line.is_whole(*kinds) for line in having) >= GOALS[kinds] * len(having)


def test_every_rule_serves_some_family_or_says_why_it_is_kept() -> None:
    lines = [line for _, some in page().values() for line in some]
    idle = coverage_table.idle_rules(lines)
    assert sorted(idle) == sorted(coverage_table.KEPT_RULES), "rules that serve nothing"
    assert set(idle) <= {rule.id for rule in load_catalogue(())[0]}
