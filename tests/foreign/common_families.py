"""Models for the tests that every model of transformers shares; copied beside them before they run.

The tests are transformers' own, from its source distribution, which leaves out the modules that give each
model its configuration and inputs. This one does that for a few families; it holds no test.
"""

from __future__ import annotations

import unittest

import torch
from support import tiny_models
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.testing_utils import torch_device

from .test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from .test_training_mixin import TrainingTesterMixin

FAMILIES = ("llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss")


class Tester:
    """Configuration and inputs of one family, under the names that the tests ask for."""

    batch_size, seq_length, is_training = 13, 7, True

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        config = self.get_config()
        self.hidden_size, self.num_hidden_layers = config.hidden_size, config.num_hidden_layers
        self.num_attention_heads, self.vocab_size = config.num_attention_heads, config.vocab_size
        self.causal_lm_class = model_class(AutoModelForCausalLM, model_type)
        self.sequence_classification_class = model_class(AutoModelForSequenceClassification, model_type)

    def get_config(self) -> AutoConfig:
        config = tiny_models.tiny_config(self.model_type)
        # Tests of initialisation, and tests that share a tolerance, expect small sizes and few layers.
        config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id = 99, 0, 1, 2
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[AutoConfig, dict[str, torch.Tensor]]:
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = torch.tril(torch.ones_like(ids)).to(torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


def model_class(auto: type, model_type: str) -> type | None:
    """The class that ``auto`` stands for in a family, if it has one."""
    try:
        return auto._model_mapping[type(tiny_models.tiny_config(model_type))]
    except KeyError:
        return None


class FamilyTest(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    """All the tests, for the family of the class below it."""

    family: str

    def setUp(self) -> None:
        self.model_tester = Tester(self.family)


for _family in FAMILIES:
    _autos = (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification)
    _classes = tuple(cls for auto in _autos if (cls := model_class(auto, _family)) is not None)
    _name = "".join(part.title() for part in _family.split("_")) + "ModelTest"
    _body = {"family": _family, "all_model_classes": _classes, "__module__": __name__}
    globals()[_name] = type(_name, (FamilyTest, unittest.TestCase), _body)
