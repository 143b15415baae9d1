"""What quantization is called, in the files of models and in the status."""

from __future__ import annotations

#: ``quant_method`` in the configuration of a model that we have quantized.
QUANT_METHOD = "liteboost"
#: The row of the status.
RULE = "quantization"
#: The row of checkpoints of others, by which they are left to theirs.
CHECKPOINTS = "quantization.checkpoints"
#: Attribute of a model that is sharded over processes: its `parallel.tensor.plan.ShardingPlan`.
PLAN = "_liteboost_plan"
