"""torch.compile of served models: no break, our ops in the graph, equal results, and undo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import numbers, tiny_models

import liteboost_adaptor


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that keeps the graphs it is handed and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        self.graphs.append(graph)
        return graph

    def ours(self) -> dict[str, int]:
        """Op -> how often it stands in the graphs."""
        found: dict[str, int] = {}
        for graph in self.graphs:
            for node in graph.graph.nodes:
                name = str(node.target)
                if node.op == "call_function" and name.startswith("liteboost."):
                    found[name.split(".")[1]] = found.get(name.split(".")[1], 0) + 1
        return found


def run(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_one_graph_without_a_break_and_our_ops_in_it(family: str) -> None:
    model = tiny_models.build(family)
    inputs = tiny_models.example_inputs(model)
    expected = run(model, inputs)
    liteboost_adaptor.apply(model)
    eager = run(model, inputs)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    found = run(compiled, inputs)
    assert len(graphs.graphs) == 1
    ours = graphs.ours()
    gated = ours.get("gated_linear", 0) + ours.get("gated_activation", 0)  # the latter for fused layers
    assert ours["rope"] == ours["attention"] == gated == model.config.num_hidden_layers
    assert ours["rms_norm"] > 0 and ours["linear"] > 0 and ours["add_rms_norm"] > 0
    torch.testing.assert_close(found, eager, rtol=1e-6, atol=1e-6)
    assert numbers.relative(found, expected) <= 2e-5


def test_the_default_backend_gives_equal_results() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    expected = run(model, inputs)
    liteboost_adaptor.apply(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert numbers.relative(run(compiled, inputs), expected) <= 2e-5


def test_undo_after_compilation_gives_the_originals_and_apply_ours_again() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    unserved = run(compiled, inputs)
    assert graphs.ours() == {}
    liteboost_adaptor.apply(model)
    assert numbers.relative(run(compiled, inputs), unserved) <= 2e-5
    assert graphs.ours()["rope"] == 2
    liteboost_adaptor.undo()
    assert torch.equal(run(compiled, inputs), unserved)
    count = len(graphs.graphs)
    assert torch.equal(run(compiled, inputs), unserved)
    assert len(graphs.graphs) == count, "each call is compiled anew"


def test_a_model_compiled_before_its_first_use_is_served_or_says_so() -> None:
    liteboost_adaptor.apply()
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    found = run(compiled, inputs)
    said = " ".join(liteboost_adaptor.status().environment)
    assert graphs.ours().get("rope") == 2 or "compiled" in said
    liteboost_adaptor.undo()
    assert numbers.relative(run(model, inputs), found) <= 2e-5


def test_module_compile_in_place() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    expected = run(model, inputs)
    liteboost_adaptor.apply(model)
    graphs = Graphs()
    model.compile(backend=graphs, fullgraph=True)
    assert numbers.relative(run(model, inputs), expected) <= 2e-5
    assert graphs.ours()["attention"] == 2


def test_apply_to_a_compiled_model() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    expected = run(model, inputs)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    liteboost_adaptor.apply(compiled)
    assert numbers.relative(run(compiled, inputs), expected) <= 2e-5
    assert graphs.ours()["attention"] == 2
    liteboost_adaptor.undo(compiled)
    assert torch.equal(run(compiled, inputs), expected)


def test_compiled_training_step_gives_the_originals_gradients() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)

    def gradients(run_model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        run_model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(model)
    liteboost_adaptor.apply(model)
    found = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    for ours, original in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, original)


def test_export_has_our_ops() -> None:
    model = tiny_models.build("llama")
    norm = model.model.norm
    x = torch.randn(2, 5, 64)
    liteboost_adaptor.apply(model)
    with torch.no_grad():
        exported = torch.export.export(norm, (x,))
        names = {str(node.target) for node in exported.graph.nodes}
        assert any("liteboost.rms_norm" in name for name in names)
        torch.testing.assert_close(exported.module()(x), norm(x))


def test_trace_records_the_original_and_runs_with_gradients() -> None:
    """A trace outlives the call it was made in: it must run where gradients are wanted, and without us."""
    norm = tiny_models.build("llama").model.norm
    x = torch.randn(2, 5, 64)
    liteboost_adaptor.apply(norm)
    with torch.no_grad():
        traced = torch.jit.trace(norm, (x,))
    assert "liteboost" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x + 1), norm(x + 1))
