"""``torch.compile``, ``torch.export`` and traces: one graph, our ops in it, and the original's numbers."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import calls, numbers, tiny_models
from support.ways import families
from torch import nn

import liteboost_adaptor
from liteboost_adaptor import config, eligibility


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(**tiny_models.example_inputs(model), use_cache=False).logits


def ops_of(graph: torch.fx.Graph) -> Counter[str]:
    """How often each of our ops stands in a graph."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return Counter(name.split(".")[1] for name in names if name.startswith("liteboost."))


def assert_complete(ours: Counter[str], eager: calls.Served) -> None:
    """The graph holds an op for each call that an eager run serves."""
    kinds = eager.kinds
    norms = sum(count for name, count in ours.items() if "norm" in name)
    linears = ours["linear"] + 2 * ours["gated_linear"]
    assert norms == kinds["norm"] > 0 and linears == kinds["linear"] > 0
    assert ours["attention"] == kinds["attention"] and ours["rope"] == kinds["rope"]


class Graphs:
    """A backend that keeps the graphs it is handed and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        self.graphs.append(graph)
        return graph

    def ours(self) -> Counter[str]:
        """How often each of our ops stands in them."""
        return sum((ops_of(graph.graph) for graph in self.graphs), Counter())


#: Families of RMSNorms behind residual sums, which are one op in a graph, too.
SUMS_BEFORE_NORMS = ("llama", "gemma2", "phi3", "qwen3")


@families(
    "llama",
    "gpt2",
    "gemma2",
    "gpt_neox",
    "phi3",
    "qwen3",
    later=(
        "olmo2",
        "cohere",
        "opt",
        "mixtral",
        "gpt_oss",
        "deepseek_v3",
        "mamba2",
        "qwen3_next",
        "qwen3_moe",
    ),
)
def test_compile_fullgraph(family: str, level: int) -> None:
    model = tiny_models.build(family)
    expected = logits(model)
    liteboost_adaptor.apply(model, level=level)
    with calls.served() as served:
        eager = logits(model)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    found = logits(compiled)
    assert len(graphs.graphs) == 1
    ours = ops_of(graphs.graphs[0].graph)
    assert_complete(ours, served)
    assert ours["add_rms_norm"] > 0 or family not in SUMS_BEFORE_NORMS
    assert numbers.relative(found, eager) <= 2e-6 and numbers.relative(found, expected) <= 2e-5
    liteboost_adaptor.undo(model)
    assert torch.equal(logits(compiled), expected)
    assert ops_of(graphs.graphs[-1].graph) == Counter()


def test_the_default_backend_gives_equal_results() -> None:
    model = tiny_models.build("llama")
    expected = logits(model)
    liteboost_adaptor.apply(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert numbers.relative(logits(compiled), expected) <= 2e-5


def test_undo_after_compilation_gives_the_originals_and_apply_ours_again() -> None:
    model = tiny_models.build("llama")
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    unserved = logits(compiled)
    assert graphs.ours() == {}
    liteboost_adaptor.apply(model)
    assert numbers.relative(logits(compiled), unserved) <= 2e-5
    assert graphs.ours()["rope"] == 2
    liteboost_adaptor.undo()
    assert torch.equal(logits(compiled), unserved)
    count = len(graphs.graphs)
    assert torch.equal(logits(compiled), unserved)
    assert len(graphs.graphs) == count, "each call is compiled anew"


def test_a_model_compiled_before_its_first_use_is_served_or_says_so() -> None:
    liteboost_adaptor.apply()
    model = tiny_models.build("llama")
    graphs = Graphs()
    found = logits(torch.compile(model, backend=graphs, fullgraph=True))
    said = " ".join(liteboost_adaptor.status().environment)
    assert graphs.ours()["rope"] == 2 or "compiled" in said
    liteboost_adaptor.undo()
    assert numbers.relative(logits(model), found) <= 2e-5


def test_module_compile_in_place() -> None:
    model = tiny_models.build("llama")
    expected = logits(model)
    liteboost_adaptor.apply(model)
    graphs = Graphs()
    model.compile(backend=graphs, fullgraph=True)
    assert numbers.relative(logits(model), expected) <= 2e-5
    assert graphs.ours()["attention"] == 2


def test_apply_to_a_compiled_model() -> None:
    model = tiny_models.build("llama")
    expected = logits(model)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    liteboost_adaptor.apply(compiled)
    assert numbers.relative(logits(compiled), expected) <= 2e-5
    assert graphs.ours()["attention"] == 2
    liteboost_adaptor.undo(compiled)
    assert torch.equal(logits(compiled), expected)


def test_a_compiled_training_step_gives_the_originals_gradients() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)

    def gradients(run: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        run(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(model)
    liteboost_adaptor.apply(model)
    found = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    for ours, original in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, original)


def test_a_trace_records_the_original_and_runs_with_gradients() -> None:
    """A trace outlives the call it was made in: it must run where gradients are wanted, and without us."""
    norm = tiny_models.build("llama").model.norm
    x = torch.randn(2, 5, 64)
    liteboost_adaptor.apply(norm)
    with torch.no_grad():
        traced = torch.jit.trace(norm, (x,))
    assert "liteboost" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x + 1), norm(x + 1))


@pytest.fixture
def exports_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """``LITEBOOST_TORCH_EXPORT=ops``, which a process reads once."""
    monkeypatch.setattr(eligibility, "EXPORTS_OPS", True)


def test_the_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, records_ops in (("", False), ("original", False), ("ops", True)):
        read = config.read({"LITEBOOST_TORCH_EXPORT": text})
        monkeypatch.setattr(config, "settings", lambda read=read: read)
        spec = importlib.util.spec_from_file_location("liteboost_adaptor.again", eligibility.__file__)
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
        assert records_ops is again.EXPORTS_OPS


@families("llama", "gpt_oss", later=("gpt2", "gemma2", "gpt_neox", "phi3", "mixtral", "qwen3_next"))
def test_export_holds_the_original(family: str, level: int) -> None:
    """A program that is taken elsewhere, or converted, is the original's: no_grad or not, with gradients."""
    model = tiny_models.build(family)
    inputs = {**tiny_models.example_inputs(model), "use_cache": False}
    expected = logits(model)
    liteboost_adaptor.apply(model, level=level)
    with calls.served() as before:
        logits(model)
    with torch.no_grad():
        exported = torch.export.export(model, (), inputs)
    assert ops_of(exported.graph) == Counter()
    found = exported.module()(**inputs).logits
    assert found.requires_grad and numbers.relative(found.detach(), expected) <= 2e-6
    with calls.served() as after:
        logits(model)
    assert after.kinds == before.kinds and after.kinds["linear"] > 0


@pytest.mark.usefixtures("exports_ops")
@families("llama", "gpt2", "gemma2", "gpt_neox", "phi3", "mixtral", "gpt_oss", later=("qwen3", "olmo2"))
def test_export_of_ops(family: str, level: int, tmp_path: Path) -> None:
    model = tiny_models.build(family)
    expected = logits(model)
    inputs = {**tiny_models.example_inputs(model), "use_cache": False}
    liteboost_adaptor.apply(model, level=level)
    with calls.served() as served:
        eager = logits(model)
    with torch.no_grad():
        exported = torch.export.export(model, (), inputs)
    ours = ops_of(exported.graph)
    assert_complete(ours, served)
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for run in (exported.module(), loaded):
        with torch.no_grad():
            found = run(**inputs).logits
        assert numbers.relative(found, eager) <= 2e-6 and numbers.relative(found, expected) <= 2e-5
    liteboost_adaptor.undo(model)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("is_strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("records_ops", [False, True], ids=["original", "ops"])
def test_export_is_no_mixture(records_ops: bool, is_strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way the graph is taken: all that is served in eager mode is served in it, or nothing is."""
    monkeypatch.setattr(eligibility, "EXPORTS_OPS", records_ops)
    model = tiny_models.build("llama")
    inputs = {**tiny_models.example_inputs(model), "use_cache": False}
    liteboost_adaptor.apply(model)
    with torch.no_grad():
        graph = torch.export.export(model, (), inputs, strict=is_strict).graph
    if not records_ops:
        assert ops_of(graph) == Counter()
        return
    left = {str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("aten.")}
    assert not left & {"linear", "silu", "rsqrt", "scaled_dot_product_attention"}


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_an_export_of_integers_holds_their_ops_alone(scheme: str) -> None:
    """Quantized layers have no original code; all else is the original's."""
    model = tiny_models.build("llama")
    inputs = {**tiny_models.example_inputs(model), "use_cache": False}
    liteboost_adaptor.apply(model, quant=scheme)
    expected = logits(model)
    with torch.no_grad():
        exported = torch.export.export(model, (), inputs)
        found = exported.module()(**inputs).logits
    ours = ops_of(exported.graph)
    assert ours and set(ours) <= {"linear_packed", "linear_w8a8"}
    assert numbers.relative(found, expected) <= 2e-6


def test_export_with_gradients_holds_the_original() -> None:
    """What is exported where gradients are wanted must have them."""
    model = tiny_models.build("llama")
    inputs = {**tiny_models.example_inputs(model), "use_cache": False}
    model(**inputs).logits.square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()  # the exported program shares the parameters
    liteboost_adaptor.apply(model)
    exported = torch.export.export(model, (), inputs)
    assert ops_of(exported.graph) == Counter()
    run = exported.module()
    run(**inputs).logits.square().mean().backward()
    for found, wanted in zip(run.parameters(), expected, strict=True):
        torch.testing.assert_close(found.grad, wanted)
