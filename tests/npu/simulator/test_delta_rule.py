"""Gated delta rule and block-sparse attention of the simulator against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from .operators import RELEASE, call, close, generator, in_release, integers, normal, on_soc, refused

BF16 = torch.bfloat16


def delta_inputs(tokens, key_heads, value_heads, dk, dv, seed):
    keys = (normal((tokens, key_heads, dk), torch.float32, seed + k) for k in range(2))
    q, k = (torch.nn.functional.normalize(each, dim=-1).to(BF16) for each in keys)
    v = normal((tokens, value_heads, dv), BF16, seed + 2)
    beta = torch.rand(tokens, value_heads, generator=generator(seed + 3)).to(BF16)
    g = -torch.rand(tokens, value_heads, generator=generator(seed + 4))
    return q, k, v, beta, g


def transformers_recurrence(q, k, v, g, beta, state, scale):
    """One sequence as transformers' torch_recurrent_gated_delta_rule has it, in float64.

    Inputs are (T, N, D), the state (N, Dk, Dv). Returns the outputs and the state after each token.
    """
    repeat = v.shape[1] // q.shape[1]
    q, k = (t.double().repeat_interleave(repeat, 1) for t in (q, k))
    v, beta, state = v.double(), beta.double(), state.double()
    outputs, states = [], []
    for t in range(q.shape[0]):
        state = state * g[t].double().exp()[:, None, None]
        memory = (state * k[t][:, :, None]).sum(-2)
        delta = (v[t] - memory) * beta[t][:, None]
        state = state + k[t][:, :, None] * delta[:, None, :]
        outputs.append((state * (q[t] * scale)[:, :, None]).sum(-2))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


@pytest.mark.parametrize("heads", [(1, 1), (2, 6)])
@pytest.mark.parametrize("dims", [(16, 8), (5, 7)])
def test_recurrent_rule_accepts_part_of_what_was_speculated(heads, dims):
    lengths = [2, 0, 4, 1]
    tokens, blocks = sum(lengths), 11
    q, k, v, beta, g = delta_inputs(tokens, *heads, *dims, 1)
    state = normal((blocks, heads[1], dims[1], dims[0]), BF16, 9)
    index = torch.randperm(blocks, generator=generator(10))[:tokens].int()
    accepted = torch.tensor([2, 1, 3, 1], dtype=torch.int32)
    before, out = state.clone(), torch.empty(tokens, heads[1], dims[1], dtype=BF16)
    given = torch.tensor(lengths, dtype=torch.int32), index, g, None, accepted
    call("aclnnRecurrentGatedDeltaRule", q, k, v, beta, state, *given, 0.25, out)
    start, untouched = 0, set(range(blocks))
    for length, many in zip(lengths, accepted.tolist(), strict=True):
        end = start + length
        if length == 0:
            continue
        initial = before[int(index[start + many - 1])].transpose(-1, -2)
        o, s = transformers_recurrence(
            q[start:end], k[start:end], v[start:end], g[start:end], beta[start:end], initial, 0.25
        )
        close(out[start:end], o, inside=1e-5)
        for t in range(length):
            block = int(index[start + t])
            close(state[block], s[t].transpose(-1, -2), inside=1e-5)
            untouched.discard(block)
        start = end
    assert untouched
    for block in untouched:
        assert torch.equal(state[block], before[block])


def test_recurrent_rule_without_accepted_tokens_starts_at_the_first_block():
    outs = []
    for accepted in (torch.ones(2, dtype=torch.int32), None):
        state = normal((4, 4, 8, 16), BF16, 33)
        given = recurrent(state=state, accepted=accepted)
        call(*given)
        outs.append((given[-1], state))
    assert outs[0][0].abs().max() > 0
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


def test_recurrent_rule_decays_each_key_dimension():
    q, k, v, beta, _ = delta_inputs(3, 1, 2, 6, 4, 20)
    gk = -torch.rand(3, 2, 6, generator=generator(21))
    state = normal((3, 2, 4, 6), BF16, 22)
    initial, out = state[0].double(), torch.empty(3, 2, 4, dtype=BF16)
    lengths, index, accepted = (torch.tensor(each, dtype=torch.int32) for each in ([3], [0, 1, 2], [1]))
    given = lengths, index, None, gk, accepted
    call("aclnnRecurrentGatedDeltaRule", q, k, v, beta, state, *given, 1.0, out)
    s, expected = initial, []
    for t in range(3):
        s = s * gk[t].double().exp()[:, None, :]
        kt, qt = k[t].double().expand(2, 6), q[t].double().expand(2, 6)
        delta = (v[t].double() - (s @ kt[:, :, None]).squeeze(-1)) * beta[t].double()[:, None]
        s = s + delta[:, :, None] * kt[:, None, :]
        expected.append((s @ qt[:, :, None]).squeeze(-1))
    close(out, torch.stack(expected), inside=1e-5)


@pytest.mark.parametrize("state_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("lengths", [[1], [70, 3, 129]])
def test_chunk_rule(state_dtype, lengths):
    tokens = sum(lengths)
    q, k, v, beta, g = delta_inputs(tokens, 2, 4, 16, 8, 30)
    initial = normal((len(lengths), 4, 8, 16), state_dtype, 35)
    final, out = torch.empty_like(initial), torch.empty(tokens, 4, 8, dtype=BF16)
    given = initial, torch.tensor(lengths, dtype=torch.int32), g
    arguments = "aclnnChunkGatedDeltaRule", q, k, v, beta, *given, 0.25, out, final
    with in_release("9.2.0" if state_dtype == torch.float32 else RELEASE):
        call(*arguments)
    if state_dtype == torch.float32:
        with in_release("9.1.0"):
            refused("initialState is Float; supported here: BFloat16", *arguments)
    start = 0
    for b, length in enumerate(lengths):
        part = slice(start, start + length)
        o, s = transformers_recurrence(
            q[part], k[part], v[part], g[part], beta[part], initial[b].transpose(-1, -2), 0.25
        )
        close(out[part], o, inside=1e-5)
        close(final[b], s[-1].transpose(-1, -2), inside=1e-5)
        start += length


def test_chunk_rule_without_a_gate_does_not_decay():
    q, k, v, beta, g = delta_inputs(5, 1, 1, 8, 8, 40)
    initial = normal((1, 1, 8, 8), BF16, 45)
    outs = []
    for gate in (None, torch.zeros_like(g)):
        final, out = torch.empty_like(initial), torch.empty(5, 1, 8, dtype=BF16)
        given = initial, torch.tensor([5], dtype=torch.int32), gate
        call("aclnnChunkGatedDeltaRule", q, k, v, beta, *given, 1.0, out, final)
        outs.append((out, final))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


def recurrent(**changed):
    q, k, v, beta, g = delta_inputs(4, 2, 4, 16, 8, 50)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "beta": beta,
        "state": torch.zeros(4, 4, 8, 16, dtype=BF16),
        "lengths": torch.tensor([2, 2], dtype=torch.int32),
        "index": torch.arange(4).int(),
        "g": g,
        "gk": None,
        "accepted": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
        "out": torch.empty(4, 4, 8, dtype=BF16),
    }
    return "aclnnRecurrentGatedDeltaRule", *(arguments | changed).values()


def test_limits_of_the_delta_rules():
    _, q, k, v, beta, state, lengths, index, g, *_ = recurrent()
    refused("ssmStateIndices is null", *recurrent(index=None), code=161001)
    refused("query is Float", *recurrent(q=q.float()))
    refused("g is BFloat16", *recurrent(g=g.bfloat16()))
    refused("beta is Float", *recurrent(beta=beta.float()))
    refused("beta has shape", *recurrent(beta=beta[:, :2]))
    refused("stateRef is Float", *recurrent(state=state.float()))
    refused("stateRef has shape", *recurrent(state=torch.zeros(4, 4, 16, 8, dtype=BF16)))
    refused(
        "stateRef is not contiguous", *recurrent(state=torch.zeros(4, 4, 16, 8, dtype=BF16).transpose(-1, -2))
    )
    refused("4 tokens for 3 blocks", *recurrent(state=state[:3]))
    refused(
        "at most 8 tokens",
        *recurrent(lengths=torch.tensor([], dtype=torch.int32), accepted=torch.ones(0).int()),
    )
    refused("actualSeqLengths is Long", *recurrent(lengths=lengths.long()))
    refused("ssmStateIndices has shape", *recurrent(index=index[:3]))
    refused("numAcceptedTokens has shape", *recurrent(accepted=torch.ones(4).int()))
    refused("not a multiple", *recurrent(q=q[:, :1].repeat(1, 3, 1), k=k[:, :1].repeat(1, 3, 1)))
    wide = {"q": torch.zeros(4, 2, 513, dtype=BF16), "k": torch.zeros(4, 2, 513, dtype=BF16)}
    refused("heads of 513, at most 512", *recurrent(**wide))
    initial, out = state[:2], torch.empty(4, 4, 8, dtype=BF16)

    def chunk(**changed):
        arguments = {
            "q": q,
            "k": k,
            "v": v,
            "beta": beta,
            "initial": initial,
            "lengths": lengths,
            "g": g,
            "scale": 1.0,
            "out": out,
            "final": torch.empty_like(initial),
        }
        return "aclnnChunkGatedDeltaRule", *(arguments | changed).values()

    refused("initialState is Half", *chunk(initial=initial.half()))
    refused("finalState is Float", *chunk(final=initial.float()))
    refused("initialState has shape", *chunk(initial=state))
    refused("g has shape", *chunk(g=g[:, :1]))
    refused("out is Float", *chunk(out=out.float()))
    wide = {"q": torch.zeros(4, 2, 129, dtype=BF16), "k": torch.zeros(4, 2, 129, dtype=BF16)}
    refused("heads of 129, at most 128", *chunk(**wide))
    many = {"q": torch.zeros(4, 65, 16, dtype=BF16), "k": torch.zeros(4, 65, 16, dtype=BF16)}
    refused("65 heads, at most 64", *chunk(**many))
    with on_soc("310P"):
        refused("310P", *recurrent())
        refused("310P", *chunk())


# ---- block-sparse attention ------------------------------------------------------------------------------


def chosen_blocks(lengths, kv_lengths, heads, bx, by, seed):
    """Random key blocks for each query block and head: (selectIdx, selectNumIdx) and as lists."""
    most = max(-(-n // by) for n in kv_lengths)
    rows, all_lists = [], []
    draw = generator(seed)
    for length, kv in zip(lengths, kv_lengths, strict=True):
        for _ in range(-(-length // bx)):
            lists = []
            for _ in range(heads):
                blocks = -(-kv // by)
                take = int(torch.randint(0, blocks + 1, (1,), generator=draw))
                lists.append(sorted(torch.randperm(blocks, generator=draw)[:take].tolist()))
            rows.append([line + [-1] * (most - len(line)) for line in lists])
            all_lists.append(lists)
    counts = [[len(line) for line in lists] for lists in all_lists]
    return torch.tensor(rows), torch.tensor(counts), all_lists


@pytest.mark.parametrize("layout", ["TND", "BNSD"])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_rain_fusion_attention(layout, dtype, kv_heads):
    heads, d, bx, by, scale = 4, 16, 8, 6, 0.25
    lengths, kv_lengths = [13, 8], [17, 20]
    if layout == "BNSD":  # padded to the longest
        shapes = [(2, heads, 13, d), *[(2, kv_heads, 20, d)] * 2]
    else:
        shapes = [(21, heads, d), *[(37, kv_heads, d)] * 2]
    q, k, v = (normal(shape, dtype, 60 + i) for i, shape in enumerate(shapes))
    select, counts, lists = chosen_blocks(lengths, kv_lengths, heads, bx, by, 63)
    assert (counts == 0).any()  # a block that chooses nothing gives zeros
    out = torch.zeros_like(q)
    blocks = select, counts, (bx, by), None, lengths, kv_lengths, None
    attributes = layout, layout, kv_heads, 0, scale, 0, 0
    call("aclnnRainFusionAttention", q, k, v, *blocks, *attributes, out, None)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    block = start = kv_start = 0
    for b, (length, kv) in enumerate(zip(lengths, kv_lengths, strict=True)):
        for at in range(0, length, bx):
            rows = slice(at, min(at + bx, length))
            for h in range(heads):
                keys = [j for c in lists[block][h] for j in range(c * by, min((c + 1) * by, kv))]
                if keys:
                    g = h // (heads // kv_heads)
                    if layout == "BNSD":
                        part, kk, vv = q[b, h, rows], k[b, g, keys], v[b, g, keys]
                    else:
                        lines = [kv_start + j for j in keys]
                        part, kk, vv = q[start:][rows, h], k[lines, g], v[lines, g]
                    p = torch.softmax(part.double() @ kk.double().t() * scale, -1) @ vv.double()
                    if layout == "BNSD":
                        expected[b, h, rows] = p
                    else:
                        expected[start + rows.start : start + rows.stop, h] = p
            block += 1
        start, kv_start = start + length, kv_start + kv
    close(out, expected, inside=1e-6)


def test_limits_of_rain_fusion_attention():
    q, k = normal((16, 4, 8), torch.float16, 1), normal((12, 2, 8), torch.float16, 2)
    select, counts = torch.zeros(2, 4, 2, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)

    def rain(**changed):
        arguments = {
            "q": q,
            "k": k,
            "v": k,
            "select": select,
            "counts": counts,
            "shape": (8, 6),
            "mask": None,
            "ql": (16,),
            "kl": (12,),
            "table": None,
            "qf": "TND",
            "kf": "TND",
            "heads": 2,
            "mask_type": 0,
            "scale": 1.0,
            "precise": 0,
            "block": 0,
            "out": torch.empty_like(q),
            "lse": None,
        }
        return "aclnnRainFusionAttention", *(arguments | changed).values()

    refused("query is Float", *rain(q=q.float()))
    refused("key is BFloat16", *rain(k=k.bfloat16()))
    refused("selectIdx is Int", *rain(select=select.int()))
    refused("selectIdx is null", *rain(select=None), code=161001)
    refused("selectNumIdx has shape", *rain(counts=counts[:1]))
    refused("qInputLayout 'BSH'", *rain(qf="BSH"))
    refused("BNSD needs 4 axes", *rain(kf="BNSD"))
    refused("two positive values", *rain(shape=(8,)))
    refused("two positive values", *rain(shape=(8, 0)))
    refused("actualSeqLengths", *rain(ql=None))
    refused("attenMask is not supported", *rain(mask=torch.zeros(1, 1, dtype=torch.bool)))
    refused("blockTable is not supported", *rain(table=integers(0, 1, (1, 1), 3, torch.int32)))
    refused("innerPrecise 2", *rain(precise=2))
    bf16 = {"q": q.bfloat16(), "k": k.bfloat16(), "v": k.bfloat16(), "out": torch.empty_like(q.bfloat16())}
    refused("innerPrecise 1 with BFloat16", *rain(**bf16, precise=1))
    refused("no multiple", *rain(heads=3))
    six = normal((16, 6, 8), torch.float16, 4)
    refused("it must divide 128", *rain(q=six, heads=2, out=torch.empty_like(six)))
    refused("selectIdx is for 1 query blocks", *rain(select=select[:1], counts=counts[:1]))
    refused("attentionOut has shape", *rain(out=torch.empty(16, 4, 4, dtype=torch.float16)))
    with on_soc("310P"):
        refused("310P", *rain())
