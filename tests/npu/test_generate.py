"""Level 1 on an NPU: what ``generate`` asks between two tokens, and that its results are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import llamas
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    EosTokenCriteria,
    LlamaForCausalLM,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

import liteboost_adaptor
from liteboost_adaptor.environment import npu_rotary


@pytest.fixture(autouse=True)
def at_level_one(no_grad: None, undone: None) -> None:
    liteboost_adaptor.apply(level=1)


def llama(layers: int = 1, **changes: Any) -> LlamaForCausalLM:
    settings = {"num_hidden_layers": layers, "pad_token_id": 0, "eos_token_id": 2}
    return llamas.llama(device="cpu", factor=6, **settings | changes)


def prompts(rows: int, padding: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (rows, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding], ids[0, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def there(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.npu() for name, value in inputs.items()}


def calls(rule: str) -> int:
    return next(row.calls for row in liteboost_adaptor.status().rules if row.id == rule)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device: copies to it, and values it asks for."""

    sees_liteboost_ops = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        from_npu = any(each.device.type == "npu" for each in tensors)
        to_host = isinstance(out, torch.Tensor) and out.device.type == "cpu"
        if from_npu and (func.overloadpacket is torch.ops.aten._local_scalar_dense or to_host):
            self.count += 1
        return out


SETTINGS = {
    "plain": {"eos_token_id": None},
    "one end token": {"eos_token_id": 2},
    "three end tokens": {"eos_token_id": [2, 5, 9]},
    "time": {"max_time": 1e6},
    "sampled": {"do_sample": True, "top_k": 1},
}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_and_logits_are_those_of_the_cpu(settings: dict[str, Any], padding: int) -> None:
    arguments = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True, **settings}
    if not settings.get("do_sample"):
        arguments["do_sample"] = False
    model, inputs = llama(), prompts(3, padding)
    expected = model.generate(**inputs, **arguments)
    found = model.npu().generate(**there(inputs), **arguments)
    assert torch.equal(found.sequences.cpu(), expected.sequences)
    torch.testing.assert_close(
        torch.stack(found.logits).cpu(), torch.stack(expected.logits), rtol=1e-4, atol=1e-4
    )
    for rule in ("npu.generate_stop", "npu.generate_positions", "npu.generate_rotary"):
        assert calls(rule) > 0, rule


def test_rows_that_end_at_different_tokens_are_padded_as_on_the_cpu() -> None:
    model, inputs = llama(), prompts(4)
    free = model.generate(**inputs, do_sample=False, max_new_tokens=10, eos_token_id=None)[:, 7:]
    ends = sorted({int(free[0, 1]), int(free[1, 4]), int(free[2, 7])})
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=10, eos_token_id=ends)
    lengths = {int((row != 0).sum()) for row in expected}
    assert len(lengths) > 1
    assert torch.equal(
        model.npu().generate(**there(inputs), do_sample=False, max_new_tokens=10, eos_token_id=ends).cpu(),
        expected,
    )


def test_generation_stops_where_every_row_has_ended() -> None:
    model, inputs = llama(), prompts(2)
    free = model.generate(**inputs, do_sample=False, max_new_tokens=4, eos_token_id=None)[:, 7:]
    ends = [int(free[0, 1]), int(free[1, 2])]
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=40, eos_token_id=ends)
    assert expected.shape[1] <= 10
    found = model.npu().generate(**there(inputs), do_sample=False, max_new_tokens=40, eos_token_id=ends)
    assert torch.equal(found.cpu(), expected)


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.tokens.append(value)

    def end(self) -> None:
        self.tokens.append(torch.tensor(-1))


def test_a_streamer_hears_the_tokens() -> None:
    model, inputs, expected, heard = llama(), prompts(1), Heard(), Heard()
    model.generate(**inputs, do_sample=False, max_new_tokens=5, streamer=expected)
    model.npu().generate(**there(inputs), do_sample=False, max_new_tokens=5, streamer=heard)
    assert len(heard.tokens) == len(expected.tokens)
    assert all(torch.equal(a, b) for a, b in zip(heard.tokens, expected.tokens, strict=True))


@pytest.mark.parametrize("streamed", [False, True], ids=["", "streamed"])
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("ends", [None, [2, 5]], ids=["no end", "ends"])
def test_the_device_is_read_once_a_token(rows: int, padding: int, ends: Any, streamed: bool) -> None:
    if streamed and rows > 1:
        pytest.skip("a streamer hears one row")
    model, inputs = llama().npu(), there(prompts(rows, padding))
    reads = []
    for tokens in (3, 8):
        extra = {"streamer": Heard()} if streamed else {}
        with Reads() as counted:
            model.generate(
                **inputs,
                do_sample=False,
                min_new_tokens=None,
                max_new_tokens=tokens,
                eos_token_id=ends,
                **extra,
            )
        reads.append(counted.count)
    assert reads[1] - reads[0] <= 5


class Never(StoppingCriteria):
    """A criterion that is not known here."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@pytest.mark.parametrize("length", [8, 12])
@pytest.mark.parametrize("ends", [[2], [2, 5, 9], [127], []])
def test_stopping_criteria_say_what_they_said(length: int, ends: list[int]) -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(10), MaxTimeCriteria(1e6)])
    if ends:
        criteria.append(EosTokenCriteria(ends))
    ids = torch.randint(0, 10, (16, length))
    expected = criteria(ids, None)
    found = criteria(ids.npu(), None)
    assert found.dtype == torch.bool and found.device.type == "npu" and torch.equal(found.cpu(), expected)
    criteria.append(Never())
    before = calls("npu.generate_stop")
    assert torch.equal(criteria(ids.npu(), None).cpu(), criteria(ids, None))
    assert calls("npu.generate_stop") == before


def test_a_criterion_still_warns_of_a_text_that_is_too_long(caplog: pytest.LogCaptureFixture) -> None:
    from transformers.generation import stopping_criteria

    class Noted:
        def __init__(self) -> None:
            self.words: list[str] = []

        def warning_once(self, words: str) -> None:
            self.words.append(words)

    noted, former = Noted(), stopping_criteria.logger
    stopping_criteria.logger = noted
    try:
        StoppingCriteriaList([MaxLengthCriteria(20, max_position_embeddings=4)])(
            torch.ones(1, 8, dtype=torch.long, device="npu"), None
        )
    finally:
        stopping_criteria.logger = former
    assert len(noted.words) == 1 and "maximum length (4)" in noted.words[0]


def test_position_ids_of_the_user_are_used() -> None:
    model, inputs = llama(), prompts(2)
    positions = torch.arange(7)[None].expand(2, 7) * 3 + 11
    arguments = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    expected = model.generate(**inputs, position_ids=positions, **arguments)
    assert not torch.equal(expected, model.generate(**inputs, **arguments))
    before = calls("npu.generate_rotary")
    found = model.npu().generate(**there(inputs), position_ids=positions.npu(), **arguments)
    assert torch.equal(found.cpu(), expected)
    assert calls("npu.generate_rotary") == before  # their bound is not known


def test_a_decoding_loop_of_the_users_own_keeps_all_positions() -> None:
    seen = []

    def loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        wanted = ("attention_mask", "position_ids", "past_key_values", "use_cache")
        state = {name: value for name, value in kwargs.items() if name in wanted}
        for _ in range(3):
            inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=None, **state)
            outputs = model(**inputs | {"past_key_values": None, "use_cache": False}, return_dict=True)
            state = model._update_model_kwargs_for_generation(outputs, state)
            seen.append(state["position_ids"].shape[-1])
            input_ids = torch.cat([input_ids, outputs.logits[:, -1:].argmax(-1)], dim=-1)
        return input_ids

    model, inputs = llama(), prompts(1)
    expected = model.generate(**inputs, custom_generate=loop, max_new_tokens=3)
    found = model.npu().generate(**there(inputs), custom_generate=loop, max_new_tokens=3)
    assert torch.equal(found.cpu(), expected) and seen == [8, 9, 10, 8, 9, 10]


def test_without_a_cache_all_positions_are_kept() -> None:
    model, inputs = llama(), prompts(2, 2)
    arguments = {"do_sample": False, "max_new_tokens": 5, "use_cache": False, "eos_token_id": None}
    expected = model.generate(**inputs, **arguments)
    assert torch.equal(model.npu().generate(**there(inputs), **arguments).cpu(), expected)


def test_beams_are_those_of_the_cpu() -> None:
    model, inputs = llama(), prompts(2, 2)
    arguments = {"do_sample": False, "max_new_tokens": 6, "num_beams": 3, "eos_token_id": [5]}
    expected = model.generate(**inputs, **arguments)
    assert torch.equal(model.npu().generate(**there(inputs), **arguments).cpu(), expected)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_positions_are_looked_up_to_the_bit(rope: dict[str, Any], dtype: torch.dtype) -> None:
    model = llama(rope_parameters=rope, max_position_embeddings=64).npu()
    rotary, x = model.model.rotary_emb, torch.zeros(1, 1, 64, dtype=dtype, device="npu")
    for position in (0, 1, 17, 255, 256, 700):
        ids = torch.tensor([[position]], device="npu")
        expected = rotary(x, ids)
        setattr(ids, npu_rotary.BELOW, position + 1)
        with npu_rotary.looked_up(model):
            found = rotary(x, ids)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert found[0].shape == expected[0].shape and found[0].is_contiguous()


def test_a_table_follows_the_frequencies() -> None:
    model = llama().npu()
    rotary, x = model.model.rotary_emb, torch.zeros(1, 1, 64, device="npu")
    ids = torch.tensor([[9]], device="npu")
    setattr(ids, npu_rotary.BELOW, 10)
    with npu_rotary.looked_up(model):
        first = rotary(x, ids)[0].clone()
        rotary.inv_freq.mul_(2)
        second = rotary(x, ids)[0].clone()
        rotary.inv_freq = rotary.inv_freq / 2
        third = rotary(x, ids)[0].clone()
        rotary.attention_scaling = 0.5
        fourth = rotary(x, ids)[0]
    assert not torch.equal(first, second) and torch.equal(first, third)
    assert torch.equal(fourth, third * 0.5)


def test_a_table_follows_buffers_that_get_other_memory() -> None:
    model = llama().npu()
    rotary, x = model.model.rotary_emb, torch.zeros(1, 1, 64, device="npu")
    ids = torch.tensor([[9]], device="npu")
    expected = []
    for factor in (1.0, 2.0, 3.0):
        rotary.inv_freq.data = rotary.inv_freq.data * factor
        expected.append(rotary(x, ids)[0])
    rotary.inv_freq.data = rotary.inv_freq.data / 6
    setattr(ids, npu_rotary.BELOW, 10)
    with npu_rotary.looked_up(model):
        for factor, cos in zip((1.0, 2.0, 3.0), expected, strict=True):
            rotary.inv_freq.data = rotary.inv_freq.data * factor
            torch.testing.assert_close(rotary(x, ids)[0], cos)


def test_no_table_is_made_of_buffers_that_do_not_tell_of_writes() -> None:
    model = llama().npu()
    rotary, x = model.model.rotary_emb, torch.zeros(1, 1, 64, device="npu")
    ids = torch.tensor([[9]], device="npu")
    with torch.inference_mode():
        rotary.inv_freq = rotary.inv_freq * 1
        expected = [rotary(x, ids)[0], (rotary.inv_freq.mul_(2), rotary(x, ids)[0])[1]]
        rotary.inv_freq.div_(2)
        setattr(ids, npu_rotary.BELOW, 10)
        with npu_rotary.looked_up(model):
            first = rotary(x, ids)[0].clone()
            rotary.inv_freq.mul_(2)
            second = rotary(x, ids)[0]
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def test_masks_of_other_numbers_than_ones_give_transformers_positions() -> None:
    model, inputs = llama(), prompts(2, padding=3)
    inputs["attention_mask"] *= 100  # positions up to 699: beyond the shortest table
    arguments = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    expected = model.generate(**inputs, **arguments)
    assert torch.equal(model.npu().generate(**there(inputs), **arguments).cpu(), expected)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_are_computed(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model, inputs = llama(rope_parameters=rope, max_position_embeddings=8), prompts(1)
    arguments = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    before = calls("npu.generate_rotary")
    expected = model.generate(**inputs, **arguments)
    assert torch.equal(model.npu().generate(**there(inputs), **arguments).cpu(), expected)
    assert calls("npu.generate_rotary") == before


def test_a_model_is_left_as_it_was_also_after_an_error() -> None:
    model = llama().npu()
    before = dict(vars(model.model.rotary_emb))
    with pytest.raises(ZeroDivisionError), npu_rotary.looked_up(model):
        assert "forward" in vars(model.model.rotary_emb)
        _ = 1 / 0
    assert vars(model.model.rotary_emb) == before


def test_the_mask_of_one_token_is_the_one_transformers_makes() -> None:
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    ours = AttentionMaskInterface._global_mapping["sdpa"]
    assert ours is not sdpa_mask
    mask = torch.rand(3, 9) > 0.3
    mask[:, -1] = True
    arguments = {"batch_size": 3, "q_length": 1, "kv_length": 9, "q_offset": 8, "kv_offset": 0}
    expected = sdpa_mask(**arguments, attention_mask=mask, allow_is_causal_skip=False, device="cpu")
    before = calls("npu.generate_mask")
    found = ours(**arguments, attention_mask=mask.npu(), device="npu")
    assert torch.equal(found.cpu(), expected) and calls("npu.generate_mask") == before + 1
    for change in ({"q_length": 2, "q_offset": 7}, {"local_size": 4}, {"kv_length": 12}):
        other = arguments | change
        expected = sdpa_mask(**other, attention_mask=mask, device="cpu")
        assert torch.equal(ours(**other, attention_mask=mask.npu(), device="npu").cpu(), expected)
    assert calls("npu.generate_mask") == before + 1


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_the_mask_of_one_token_beside_an_encoder_is_the_one_transformers_makes_unread(kind: str) -> None:
    from transformers import masking_utils

    ours = masking_utils.AttentionMaskInterface._global_mapping[kind]
    theirs = getattr(masking_utils, f"{kind}_mask")
    whole = masking_utils.bidirectional_mask_function
    arguments = {"batch_size": 3, "q_length": 1, "kv_length": 9, "q_offset": 0, "kv_offset": 0}
    arguments |= {"mask_function": whole, "allow_is_causal_skip": False, "dtype": torch.float32}

    def checked(mask: torch.Tensor, **change: Any) -> tuple[int, int]:
        """How often it was served, and the device read; the mask is that which is not left out."""
        before, both = calls("npu.generate_mask"), arguments | change
        expected = theirs(**both, attention_mask=mask, device="cpu")
        on_npu = mask.npu()
        with Reads() as reads:
            found = ours(**both, attention_mask=on_npu, allow_is_bidirectional_skip=True, device="npu")
        assert torch.equal(found.cpu(), expected)
        return calls("npu.generate_mask") - before, reads.count

    mask = torch.rand(3, 9) > 0.3
    mask[0] = False
    assert checked(mask) == checked(torch.ones_like(mask)) == (1, 0)
    odd = masking_utils.and_masks(whole, lambda batch, head, q, kv: kv % 2 == 1)
    for change in ({"q_length": 2}, {"kv_length": 7}, {"mask_function": odd}):
        assert checked(mask, **change)[0] == 0


@pytest.mark.parametrize("seen", [5, 8, 9, 20])
def test_the_mask_of_one_token_in_a_window_is_the_one_transformers_makes(seen: int) -> None:
    from transformers import masking_utils

    ours, theirs = masking_utils.AttentionMaskInterface._global_mapping["sdpa"], masking_utils.sdpa_mask
    window = 8
    mask = torch.rand(3, seen + 1) > 0.3
    mask[:, -1] = True
    arguments = {"batch_size": 3, "q_length": 1, "q_offset": seen, "local_size": window}
    arguments |= {"kv_length": min(seen + 1, window), "kv_offset": max(seen - window + 1, 0)}
    arguments["mask_function"] = masking_utils.sliding_window_causal_mask_function(window)

    def checked(change: dict[str, Any]) -> int:
        before, both = calls("npu.generate_mask"), arguments | change
        expected = theirs(**both, attention_mask=mask, allow_is_causal_skip=False, device="cpu")
        found = ours(**both, attention_mask=mask.npu(), allow_is_causal_skip=False, device="npu")
        assert torch.equal(found.cpu(), expected)
        return calls("npu.generate_mask") - before

    assert checked({}) == 1
    narrower = masking_utils.sliding_window_causal_mask_function(3)
    odd = masking_utils.and_masks(arguments["mask_function"], lambda batch, head, q, kv: kv % 2 == 1)
    for other in (narrower, odd, masking_utils.sliding_window_bidirectional_mask_function(window)):
        assert checked({"mask_function": other}) == 0
    assert checked({"local_size": 4, "mask_function": masking_utils.causal_mask_function}) == 0


def test_at_level_zero_generate_is_transformers_own() -> None:
    from transformers.generation.utils import GenerationMixin, StopCheck

    liteboost_adaptor.undo()
    names = ("_sample", "_prepare_position_ids_for_generation", "_update_model_kwargs_for_generation")
    own = [getattr(GenerationMixin, name) for name in names] + [
        StopCheck.__call__,
        StoppingCriteriaList.__call__,
    ]
    liteboost_adaptor.apply(level=0)
    states = {row.id: row.state for row in liteboost_adaptor.status().rules}
    ours = [name for name in states if name.startswith("npu.generate")]
    assert len(ours) == 4 and {states[name] for name in ours} == {"disabled"}
    assert own == [getattr(GenerationMixin, name) for name in names] + [
        StopCheck.__call__,
        StoppingCriteriaList.__call__,
    ]
    liteboost_adaptor.apply(level=1)
    assert GenerationMixin._sample is not own[0] and StopCheck.__call__ is not own[3]
