"""What quantization is called, in the files of models and in the status."""

from __future__ import annotations

#: ``quant_method`` in the configuration of a model that we have quantized.
QUANT_METHOD = "liteboost"
#: The row of the status.
RULE = "quantization"
#: Attribute of a model that is sharded over processes: its `parallel.tensor.plan.ShardingPlan`.
PLAN = "_liteboost_plan"
