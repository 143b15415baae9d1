"""The plan: what each rank holds, worked out on the meta device; all that does not fit is said at once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from support import tiny_models

from liteboost_adaptor import cli
from liteboost_adaptor.bench import cards, planned
from liteboost_adaptor.bench.sharing import Exchanged, Sharing, exchanged
from liteboost_adaptor.errors import ConfigError, ParallelError, PlanError
from liteboost_adaptor.parallel.tensor import layout
from liteboost_adaptor.parallel.tensor.plan import (
    EMBEDDING,
    HEAD,
    NORM,
    ROWWISE,
    DimSharding,
    Segment,
    ShardingPlan,
)
from liteboost_adaptor.parallel.tensor.plan_summary import summary


def on_meta(family: str) -> torch.nn.Module:
    with torch.device("meta"):
        return tiny_models._from_config(family)


def test_parts_are_shared_evenly_and_without_gaps() -> None:
    for units, ranks in ((8, 2), (7, 3), (4, 4), (99, 4)):
        spans = [Segment(units * 3, units).span(rank, ranks) for rank in range(ranks)]
        assert spans[0][0] == 0 and spans[-1][1] == units * 3
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
        assert all((last - first) % 3 == 0 for first, last in spans)
        assert max(b - a for a, b in spans) - min(b - a for a, b in spans) in (0, 3)


def test_fewer_units_than_ranks_are_repeated() -> None:
    assert [Segment(32, 2).span(rank, 4) for rank in range(4)] == [(0, 16), (0, 16), (16, 32), (16, 32)]


def test_ranges_of_a_fused_projection() -> None:
    cut = DimSharding(0, (Segment(64, 4), Segment(32, 2), Segment(32, 2)))
    assert cut.ranges(0, 2) == [(0, 32), (64, 80), (96, 112)]
    assert cut.ranges(1, 2) == [(32, 64), (80, 96), (112, 128)]
    assert cut.ranges(0, 1) == [(0, 128)]  # adjacent ranges are one
    assert [cut.length(rank, 4) for rank in range(4)] == [48] * 4


def test_plan_of_llama() -> None:
    how = layout.infer_layout(on_meta("llama")).plan(2)
    layer = "model.layers.0"
    assert how.shardings[f"{layer}.self_attn.q_proj.weight"] == DimSharding(0, (Segment(64, 4),))
    assert how.shardings[f"{layer}.self_attn.k_proj.weight"] == DimSharding(0, (Segment(32, 2),))
    assert how.shardings[f"{layer}.self_attn.o_proj.weight"] == DimSharding(1, (Segment(64, 4),))
    assert how.shardings[f"{layer}.mlp.down_proj.weight"].dim == 1
    assert f"{layer}.input_layernorm.weight" not in how.shardings
    roles = [role for name, role in how.roles.items() if name.startswith(f"{layer}.")]
    assert roles == [ROWWISE, ROWWISE]  # two exchanges a layer
    assert how.roles["lm_head"] == HEAD
    assert not how.replicated


def test_two_heads_of_keys_on_four_ranks_change_the_group() -> None:
    how = layout.infer_layout(on_meta("llama"))
    assert how.plan(2).attributes["model.layers.0.self_attn"] == {"num_key_value_groups": 2}
    assert how.plan(4).attributes["model.layers.0.self_attn"] == {"num_key_value_groups": 1}


def test_fused_projections_are_divided_by_their_parts() -> None:
    how = layout.infer_layout(on_meta("phi3")).plan(2)
    assert how.shardings["model.layers.0.self_attn.qkv_proj.weight"].segments == (
        Segment(64, 4),
        Segment(32, 2),
        Segment(32, 2),
    )
    assert how.shardings["model.layers.0.mlp.gate_up_proj.weight"].segments == (Segment(96, 96),) * 2
    # Its forward asks the configuration where queries end.
    assert how.attributes["model.layers.0.self_attn"]["config.num_attention_heads"] == 2


def test_biases_behind_a_sum_are_added_once() -> None:
    how = layout.infer_layout(on_meta("gpt2")).plan(2)
    assert "transformer.h.0.attn.c_proj.bias" in how.rank0_only
    assert "transformer.h.0.attn.c_attn.bias" in how.shardings
    assert how.shardings["transformer.h.0.attn.c_attn.weight"].dim == 1  # Conv1D keeps its weight transposed


def test_a_norm_over_all_heads_exchanges_sums_of_squares() -> None:
    how = layout.infer_layout(on_meta("olmo2")).plan(2)
    assert how.roles["model.layers.0.self_attn.q_norm"] == NORM
    assert how.shardings["model.layers.0.self_attn.k_norm.weight"] == DimSharding(0, (Segment(32, 2),))


@pytest.mark.parametrize("family", ["bloom", "stablelm", "xlnet", "trocr", "doge"])
def test_attention_that_is_not_understood_stays_whole(family: str) -> None:
    how = layout.infer_layout(on_meta(family)).plan(2)
    touched = [name for name in how.shardings if "attn" in name or "attention" in name]
    assert not touched


def test_an_mlp_that_looks_at_all_channels_stays_whole_whatever_its_plan_says() -> None:
    model = on_meta("gemma3n_text")
    assert model.tp_plan["model.layers.*.mlp.down_proj"] == "rowwise"
    how = layout.infer_layout(model)
    assert "_gaussian_topk" in how.replicated["model.layers.0.mlp"]
    assert "model.layers.0.mlp.down_proj.weight" not in how.shardings


def test_a_norm_of_the_inputs_is_no_norm_of_heads() -> None:
    how = layout.infer_layout(on_meta("blt"))
    assert NORM not in how.roles.values()
    assert any("norm over heads" in reason for reason in how.replicated.values())


def test_attention_beside_an_mlp_leaves_its_exchange_to_it() -> None:
    how = layout.infer_layout(on_meta("gpt_neox")).plan(2)
    layer = "gpt_neox.layers.0"
    assert how.deferred[f"{layer}.mlp.dense_4h_to_h"] == f"{layer}.attention.dense"
    assert [name for name in how.roles if name.startswith(layer)] == [f"{layer}.mlp.dense_4h_to_h"]
    model = on_meta("gpt_neox")
    for module in model.modules():
        if hasattr(module, "use_parallel_residual"):
            module.use_parallel_residual = False  # then the MLP reads what attention has computed
    assert not layout.infer_layout(model).deferred
    assert not layout.infer_layout(on_meta("llama")).deferred


def test_ties_are_cut_alike() -> None:
    model = tiny_models.build("gemma")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    shardings = layout.infer_layout(model).shardings
    assert shardings["lm_head.weight"] == shardings["model.embed_tokens.weight"]


def test_everything_that_does_not_fit_is_one_error_with_the_sizes_that_do() -> None:
    how = layout.infer_layout(on_meta("llama"))
    with pytest.raises(PlanError) as caught:
        how.plan(3)
    text = str(caught.value)
    assert "4 attention heads of model.layers.0.self_attn and 1 more" in text
    assert "2 heads of keys and values" in text
    assert "World sizes that work: 2, 4." in text


def test_nothing_to_divide_is_an_error() -> None:
    model = on_meta("llama")
    model.model.layers = torch.nn.ModuleList()
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    with pytest.raises(PlanError, match="no part of it is recognised"):
        layout.infer_layout(model).plan(2)


def test_a_plan_is_plain_data() -> None:
    how = layout.infer_layout(on_meta("mixtral")).plan(2)
    assert ShardingPlan.from_json(how.to_json()) == how
    assert ShardingPlan.from_json(how.to_json()).digest() == how.digest()


def test_figures_of_a_plan() -> None:
    model = on_meta("llama")
    how = layout.infer_layout(model).plan(2)
    figures = summary(model, how)
    norms = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    assert figures["repeated"] == norms
    assert figures["weights"] == [norms + (figures["all_weights"] - norms) // 2] * 2
    assert figures["exchanges"] == {ROWWISE: 4, EMBEDDING: 1, HEAD: 1}
    # Two layers exchange 64 hidden states twice, the embedding once; half of 256 logits are put together.
    assert figures["exchanged"] == (5 * 64 + 128) * model.dtype.itemsize


def test_command_prints_the_plan_or_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.tiny_config("mixtral").save_pretrained(tmp_path)
    assert cli.main(["plan", str(tmp_path), "--tp", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("MixtralForCausalLM over 2 processes") and "2 groups of experts" in text
    assert cli.main(["plan", str(tmp_path), "--tp", "4", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["weights"]) == 4 and figures["plan"]["world_size"] == 4
    assert cli.main(["plan", str(tmp_path), "--tp", "3"]) == 1
    assert "World sizes that work: 2, 4." in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "nowhere"), "--tp", "2"]) == 2
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert "nothing is shared by one process" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path), "--tp", "2", "--dp", "2", "--sp", "2", "--cp", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("MixtralForCausalLM over 16 processes") and "2 replicas" in text
    assert "4 processes share the tokens of a prompt (LITEBOOST_SP=2, LITEBOOST_CP=2), 1024 each" in text
    assert cli.main(["plan", str(tmp_path), "--sp", "3"]) == 1
    assert "Sizes that work: 1, 2, 4." in capsys.readouterr().err


def test_memory_and_time_on_cards() -> None:
    model = on_meta("llama")
    found = layout.infer_layout(model)
    one, two, four = (
        planned.planned(model, found.plan(size), found, "910B", context=100, batch=3) for size in (1, 2, 4)
    )
    text = model.config.get_text_config()
    kept = text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * model.dtype.itemsize
    assert one.cache == 3 * 100 * kept
    # Two heads of keys and values: on four cards each keeps one, as on two.
    assert two.cache == four.cache == one.cache // 2
    assert one.weights == sum(p.nbytes for p in model.parameters())
    assert [each.weights for each in (one, two, four)] == [
        max(summary(model, found.plan(size))["weights"]) for size in (1, 2, 4)
    ]
    assert one.exchanging == 0 < two.exchanging and one.fits
    longer = planned.planned(model, found.plan(2), found, "910B", context=10**9, batch=3)
    assert not longer.fits and longer.cache == 10**7 * two.cache and longer.tokens_s < two.tokens_s
    with pytest.raises(ConfigError, match="910B, 910B-280T, 910C; found 'A100'"):
        planned.planned(model, found.plan(2), found, "A100", context=1, batch=1)


def test_memory_and_time_of_what_is_shared_beside_the_weights() -> None:
    model = on_meta("llama")
    found = layout.infer_layout(model)

    def of(tp: int = 1, context: int = 4096, batch: int = 4, **sizes: int) -> planned.Planned:
        how = found.plan(tp)
        return planned.planned(model, how, found, "910B", context, batch, Sharing(**sizes))

    one = of()
    for sizes in ({"sp": 2}, {"cp": 2}, {"dp": 2}):
        two = of(**sizes)
        assert two.cards == 2 and two.weights == one.weights and two.cache == one.cache // 2
        assert two.activations < 0.51 * one.activations + two.batch * 256 * 8
    # Of a long prompt attention is most; the last of a ring has three quarters of it and not half.
    single, ring, heads = (of(context=10**6, **sizes).prefill for sizes in ({}, {"cp": 2}, {"sp": 2}))
    assert 0.45 * single < heads < 0.6 * single and 0.7 * single < ring < 0.85 * single
    # Replicas exchange nothing; of a short context processes that share its cache lose more than they gain.
    assert of(dp=2).exchanging == 0 < of(cp=2).exchanging and of(cp=2).tokens_s < one.tokens_s
    assert of(batch=4, dp=4).device == of(batch=1).device
    both = of(tp=2, sp=2, dp=2)
    assert both.cards == 8 and both.weights == of(tp=2).weights
    with pytest.raises(ParallelError, match="LITEBOOST_SP=8"):
        of(sp=8)


def test_what_attention_exchanges_is_counted() -> None:
    model = on_meta("llama")  # 4 heads, 2 of keys and values, of 16; fp32
    found = layout.infer_layout(model)
    rows, length, item = 3, 64, model.dtype.itemsize
    heads = exchanged(model, found, 1, Sharing(sp=2), length, rows)
    # 32 tokens of 2 heads of queries and outputs and 1 of keys and values go to the other process.
    assert heads.heads == rows * 32 * (2 + 2 + 1 + 1) * 16 * item and heads.passed == 0
    ring = exchanged(model, found, 1, Sharing(cp=4), length, rows)
    assert ring.passed == rows * 16 * 2 * 2 * 16 * item and ring.heads == 0
    assert ring.joined == 4 * rows * 4 * (16 + 1) * 4
    both = exchanged(model, found, 2, Sharing(sp=2, cp=2), length, rows)
    assert both.heads == rows * 16 * (1 + 1 + 1 + 1) * 16 * item
    assert both.passed == rows * 16 * 2 * (1 + 1) * 16 * item
    assert exchanged(model, found, 1, Sharing(dp=4), length, rows) == Exchanged(0, 0, 0)


@pytest.mark.parametrize(
    ("family", "share"), [("deepseek_v3", 1), ("gemma3_text", 0.5), ("gpt_oss", 0.5), ("falcon", 1)]
)
def test_cache_that_the_plan_counts_is_the_cache_there_is(family: str, share: float) -> None:
    model = on_meta(family)
    found = layout.infer_layout(model)
    built = tiny_models.build(family)
    with torch.no_grad():
        kept = built(torch.ones(1, 4, dtype=torch.long), use_cache=True).past_key_values
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    counted = [planned.planned(model, found.plan(size), found, "910B", 4, 1).cache for size in (1, 2)]
    assert counted == [nbytes, nbytes * share]


def test_an_all_reduce_takes_longer_over_nodes() -> None:
    card = cards.CARDS["910B"]
    seconds = [cards.all_reduce_seconds(card, 1e6, size) for size in (1, 2, 8, 16)]
    assert seconds[0] == 0 and sorted(seconds) == seconds and seconds[3] > 4 * seconds[2]


def test_command_draws_a_plan_over_numbers_of_cards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.tiny_config("llama").save_pretrained(tmp_path)
    arguments = ["plan", str(tmp_path), "--tp", "2", "--context", "64", "--batch", "2"]
    assert cli.main([*arguments, "--device", "910C", "--plot", str(tmp_path / "plan.svg")]) == 0
    text = capsys.readouterr().out
    assert "2 x 64 tokens, 910C" in text and "; fits 57.6 GB" in text and "modelled, not measured" in text
    assert (tmp_path / "plan.svg").stat().st_size > 1000
    assert cli.main([*arguments, "--device", "A100"]) == 1
