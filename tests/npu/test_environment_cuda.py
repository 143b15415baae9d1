"""Level 0 on an NPU: ``cuda`` in a script leads to the NPU, and everything is taken back."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import processes

import liteboost_adaptor


@pytest.fixture(autouse=True)
def at_level_zero(undone: None) -> None:
    liteboost_adaptor.apply(level=0)


def x() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def layer(**where: Any) -> torch.nn.Module:
    return torch.nn.Linear(3, 3, **where)


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(2, device="cuda"),
    "ones with index": lambda: torch.ones(2, device=torch.device("cuda:0")),
    "arange": lambda: torch.arange(4, device="cuda"),
    "randn": lambda: torch.randn(4, device="cuda"),
    "randint": lambda: torch.randint(0, 4, (3,), device="cuda"),
    "full": lambda: torch.full((2,), 3.0, device="cuda"),
    "eye": lambda: torch.eye(3, device="cuda"),
    "linspace": lambda: torch.linspace(0, 1, 3, device="cuda"),
    "randperm": lambda: torch.randperm(4, device="cuda"),
    "tril_indices": lambda: torch.tril_indices(3, 3, device="cuda"),
    "empty_like": lambda: torch.empty_like(x(), device="cuda"),
    "new_zeros": lambda: x().new_zeros(3, device="cuda"),
    "new_tensor": lambda: x().new_tensor([3], device="cuda"),
    "tensor": lambda: torch.tensor([1, 2], device="cuda"),
    "as_tensor": lambda: torch.as_tensor(x(), device="cuda"),
    "asarray": lambda: torch.asarray(x(), device="cuda"),
    "to": lambda: x().to("cuda"),
    "to with dtype": lambda: x().to("cuda", torch.float16),
    "to by name": lambda: x().to(device="cuda:0", dtype=torch.float16),
    "to a device": lambda: x().to(torch.device("cuda")),
    "to from pinned": lambda: x().pin_memory("cuda").to("cuda", non_blocking=True),
    "to, inference mode": torch.inference_mode()(lambda: x().to("cuda")),
    "cuda": lambda: x().cuda(),
    "cuda, index": lambda: x().cuda(0),
    "cuda, name": lambda: x().cuda("cuda:0"),
    "Module.cuda": lambda: layer().cuda().weight,
    "Module.cuda, index": lambda: layer().cuda(0).weight,
    "Module.to": lambda: layer().to("cuda").weight,
    "Module(device)": lambda: layer(device="cuda").weight,
    "Module.to_empty": lambda: layer(device="meta").to_empty(device="cuda").weight,
    "Generator": lambda: torch.rand(
        3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_tensor_asked_for_on_cuda_is_on_the_npu(make: Callable[[], torch.Tensor]) -> None:
    assert make().device == torch.device("npu", 0)


def test_values_come_along() -> None:
    assert torch.equal(x().cuda().cpu(), x())
    assert torch.equal((x().to("cuda") @ x().cuda().T).cpu(), x() @ x().T)
    assert torch.tensor([3, 4], device="cuda").tolist() == [3, 4]


def test_a_tensor_that_is_there_is_not_copied() -> None:
    there = x().cuda()
    assert there.to("cuda") is there and there.cuda() is there and there.to("cuda:0") is there


def test_other_devices_are_left_alone() -> None:
    assert torch.zeros(2).device.type == "cpu" and x().to("cpu").device.type == "cpu"
    assert torch.zeros(2, device="meta").device.type == "meta" and x().to("meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.tensor([1]).device.type == "meta" and layer().weight.device.type == "meta"


def test_device_contexts_and_the_default_device() -> None:
    with torch.device("cuda"):
        assert (
            torch.ones(2).device.type == torch.tensor([1]).device.type == layer().weight.device.type == "npu"
        )
    torch.set_default_device("cuda")
    try:
        assert torch.as_tensor([1]).device.type == "npu"
    finally:
        torch.set_default_device(None)
        # Behind it `torch.get_default_device` of torch 2.9 raises, which transformers calls.
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def test_gradients_pass() -> None:
    here = x().requires_grad_()
    here.to("cuda").square().sum().backward()
    assert torch.equal(here.grad, 2 * x())


def test_what_was_saved_on_cuda_is_loaded() -> None:
    file = io.BytesIO()
    torch.save(x().cuda(), file)
    for where in ("cuda", "cuda:0", torch.device("cuda"), {"npu:0": "cuda:0"}):
        file.seek(0)
        assert torch.load(file, map_location=where).device == torch.device("npu", 0)


def test_autocast_and_scaler() -> None:
    a = torch.ones(16, 16, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        assert (a @ a).dtype == torch.float16
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with torch.cuda.amp.autocast(dtype=torch.float16):
            assert (a @ a).dtype == torch.float16
    assert torch.amp.GradScaler("cuda").is_enabled()


def test_functions_of_torch_cuda() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == torch.npu.device_count() > 0
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name("cuda:0") == torch.npu.get_device_name(0)
    torch.cuda.set_device("cuda:0")
    torch.cuda.synchronize("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(torch.device("cuda"))
    held = torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() >= before + held.numel() * 4
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() > 0 and len(torch.cuda.mem_get_info("cuda:0")) == 2
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_seeds() -> None:
    torch.cuda.manual_seed_all(3)
    first = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    state = torch.cuda.get_rng_state("cuda:0")
    following = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state, "cuda:0")
    assert torch.equal(torch.rand(4, device="cuda"), following)


def test_a_library_that_asks_for_cuda_is_told_there_is_none() -> None:
    def ask() -> tuple[bool, int]:
        return torch.cuda.is_available(), torch.cuda.device_count()

    assert ask() == (True, torch.npu.device_count())
    ask.__code__ = ask.__code__.replace(co_filename="/anywhere/site-packages/library/part.py")
    assert ask() == (False, 0)
    from transformers.utils import is_torch_cuda_available

    assert not is_torch_cuda_available()


def test_generators_are_still_generators() -> None:
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator) and isinstance(
        torch.Generator("cuda"), torch.Generator
    )
    assert not isinstance(1, torch.Generator)


def scripted(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.to(torch.float64) + torch.tensor([n], device=x.device) + torch.as_tensor([n], device=x.device)


def test_torch_jit_script_still_compiles() -> None:
    compiled = torch.jit.script(scripted)
    assert torch.equal(compiled(x(), 2), x().double() + 4)


def test_torch_compile_still_traces() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32) * torch.tensor(2.0, device=x.device)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x().cuda()).cpu(), 2 * x())


def test_undo_takes_it_back() -> None:
    liteboost_adaptor.undo()
    assert not torch.cuda.is_available()
    for make in (MAKERS["zeros"], MAKERS["to"], MAKERS["tensor"], MAKERS["cuda"]):
        with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
            make()


def test_undo_has_torch_initialize_cuda_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that is linked with CUDA would crash behind `undo` if it took CUDA for initialized."""

    def refused() -> None:
        raise RuntimeError("asked to initialize")

    torch.zeros(2, device="cuda")
    liteboost_adaptor.undo()
    monkeypatch.setattr(torch.cuda, "_lazy_init", refused)
    with pytest.raises(RuntimeError, match="asked to initialize"):
        torch.zeros(2, device="cuda")


def test_disabled_it_is_listed_and_does_nothing() -> None:
    status = liteboost_adaptor.apply(disable="npu.cuda")
    assert {row.id: row.state for row in status.rules}["npu.cuda"] == "disabled"
    assert not torch.cuda.is_available()
    assert {row.id: row.state for row in liteboost_adaptor.apply(level=0).rules}["npu.cuda"] == "applied"


IDENTITIES = """
import json, sys, torch, torch_npu
import torch.nn.functional, torch._dynamo, torch.jit._builtins
import transformers.distributed.utils, transformers.integrations.sdpa_attention, transformers.modeling_utils
from transformers import generation, masking_utils
from torch.utils._device import DeviceContext, _device_constructors
_device_constructors(); torch.jit._builtins._find_builtin(torch.tensor)

def spaces():
    from torch.amp import autocast, GradScaler
    found = [torch, torch.cuda, torch.Tensor, torch.nn.functional, torch.serialization, DeviceContext,
             autocast, GradScaler, transformers.distributed.utils,
             transformers.integrations.sdpa_attention, transformers.modeling_utils.PreTrainedModel,
             generation.utils.GenerationMixin, generation.utils.StopCheck, generation.StoppingCriteriaList]
    return [dict(vars(space)) for space in found] + [
        dict(transformers.distributed.utils.DISTRIBUTED_BACKEND_MAP),
        dict(transformers.masking_utils.AttentionMaskInterface._global_mapping),
        {key: name for key, name in torch.jit._builtins._get_builtin_table().items()
         if not name.startswith("liteboost::")}]  # loading our library enters its ops

def differences(a, b):
    return [key for x, y in zip(a, b) for key in set(x) | set(y) if x.get(key) is not y.get(key)]

def kernels():
    names = ("aten::empty.memory_format", "aten::empty_strided", "aten::gelu", "aten::gelu_backward")
    return [torch._C._dispatch_dump(name) for name in names]

before, kernels_before = spaces(), kernels()
import liteboost_adaptor
during = differences(before, spaces())
states = {row.id: row.state for row in liteboost_adaptor.status().rules if row.id.startswith("npu.")}
left = liteboost_adaptor.undo()
print(json.dumps([len(during), states, left, differences(before, spaces()), kernels() == kernels_before]))
"""


def test_undo_leaves_the_very_objects_that_were_there() -> None:
    changed, states, left, differences, same_kernels = processes.python_json(IDENTITIES, LITEBOOST_LEVEL="1")
    states.pop("npu.polar")  # only without an operator for it
    assert changed > 35 and set(states.values()) == {"applied"} and len(states) == 9
    assert left == [] and differences == [] and same_kernels


def test_a_script_written_for_cuda_runs_to_the_end() -> None:
    script = """
import liteboost_adaptor
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes)).to(device).eval()
ids = torch.tensor([[1, 2, 3]]).to(device)
with torch.no_grad(), torch.autocast("cuda", enabled=False):
    out = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
torch.cuda.synchronize()
print(json.dumps([device.type, model.device.type, out.device.type, out.shape[1]]))
"""
    assert processes.python_json(script, LITEBOOST_LEVEL="0") == ["cuda", "npu", "npu", 6]


def test_a_device_map_that_says_cuda(tmp_path: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    for where in ("cuda", "cuda:0", {"": "cuda"}, {"": "cuda:0"}, {"": 0}, torch.device("cuda")):
        model = LlamaForCausalLM.from_pretrained(tmp_path, device_map=where)
        assert {parameter.device for parameter in model.parameters()} == {torch.device("npu", 0)}, where
