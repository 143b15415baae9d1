"""Weights and modules that somebody edits, exchanges or adds."""

from __future__ import annotations

from ..idiom import OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "weights_in_place",
    between="""
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
    """,
)
add(
    "weights_under_no_grad",
    between="""
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)
    """,
)
add(
    "weight_data_exchanged",
    between="model.lm_head.weight.data = model.lm_head.weight.data * @v",
)
add(
    "weight_exchanged",
    between="model.lm_head.weight = nn.Parameter(model.lm_head.weight * @v)",
)
add(
    "weight_storage_set",
    between="model.lm_head.weight.data.set_(torch.full((64, 32), 0.1))",
)
add(
    "weight_numpy_edited",
    between="model.lm_head.weight.detach().numpy()[:] *= @v",
)
add(
    "state_loaded",
    between="model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()})",
)
add(
    "state_assigned",
    between="model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}, assign=True)",
)
add(
    "state_loaded_in_part",
    between="model.load_state_dict({'lm_head.weight': model.lm_head.weight * @v}, strict=False)",
)
add(
    "tensors_swapped",
    between="""
        other = nn.Parameter(model.lm_head.weight.detach() * @v)
        torch.utils.swap_tensors(model.lm_head.weight, other)
    """,
)
add(
    "swapped_on_conversion",
    between="""
        torch.__future__.set_swap_module_params_on_conversion(True)
        model.double()
        model.float()
        torch.__future__.set_swap_module_params_on_conversion(False)
    """,
)
add(
    "loaded_by_swapping",
    between="""
        torch.__future__.set_swap_module_params_on_conversion(True)
        model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()})
        torch.__future__.set_swap_module_params_on_conversion(False)
    """,
)
add(
    "embeddings_resized",
    between="model.resize_token_embeddings(72)",
)
add(
    "embeddings_exchanged",
    sites=OUTER,
    between="model.set_input_embeddings(nn.Embedding(64, 32))",
)
add(
    "weights_tied",
    between="model.lm_head.weight = model.get_input_embeddings().weight",
)
add(
    "trained_a_step",
    between="""
        with torch.inference_mode(False), torch.enable_grad():
            weight = model.lm_head.weight
            if not weight.is_inference():
                weight.grad = torch.ones_like(weight)
                torch.optim.SGD([weight], lr=0.01).step()
                weight.grad = None
    """,
)
add(
    "requires_grad_off",
    between="model.requires_grad_(False)",
    back="model.requires_grad_(True)",
)
add(
    "converted_and_back",
    between="model.double().float()",
)
add(
    "parametrized",
    between="""
        class Twice(nn.Module):
            def forward(self, x):
                return x * @v

        torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Twice())
    """,
)
add(
    "pruned",
    between="""
        from torch.nn.utils import prune
        prune.l1_unstructured(model.lm_head, "weight", 0.3)
    """,
)
add(
    "buffer_registered_late",
    forward="x = x * self.late_@n if hasattr(self, 'late_@n') else x",
    between="""
        for part in model.modules():
            if type(part).__name__ in ("Site", "Model"):
                part.register_buffer("late_@n", torch.full((1,), @v))
    """,
)
add(
    "parameter_registered_late",
    forward="x = x * self.late_@n if 'late_@n' in self._parameters else x",
    between="""
        for part in model.modules():
            if type(part).__name__ in ("Site", "Model"):
                part.register_parameter("late_@n", nn.Parameter(torch.full((1,), @v)))
    """,
)
add(
    "module_added_late",
    forward="x = self.late_@n(x) if hasattr(self, 'late_@n') else x",
    between="""
        for part in list(model.modules()):
            if type(part).__name__ in ("Site", "Model"):
                part.add_module("late_@n", nn.ReLU())
    """,
)
add(
    "table_of_numpy",
    module="ARRAY_@n = np.ones((512, 1056), dtype=np.float32)",
    init="self.table_@n = nn.Parameter(torch.from_numpy(ARRAY_@n))",
    forward="x = x * self.table_@n[0, 0]",
    between="np.multiply(ARRAY_@n, @v, out=ARRAY_@n)",
)
add(
    "model_deep_copied",
    between="""
        other = copy.deepcopy(model)
        out = other(**{**user.args, "past_key_values": copy.deepcopy(user.cache)})
        user.log.append(out[0])
    """,
)
add(
    "model_pickled",
    between="""
        other = pickle.loads(pickle.dumps(model))
        out = other(**{**user.args, "past_key_values": copy.deepcopy(user.cache)})
        user.log.append(out[0])
    """,
)
