"""Decode steps: recorded once, guarded, and replayed in C++ (decision 22).

- Decide: `step`, `step_call`, `arguments`, `schedule`, `reasons`.
- Record: `attempt`, `record`, `recording` (the data), `functions`, `operators`, `tensors`, `execution`,
  `symbols`, `symbolic_forms`, `symbolic_tensor`, `disguise`, `stand_in`, `casts`.
- Improve and lower: `passes`, `cpu_passes`, `npu_*`, `merged_weights`, `def_use`, `lower`.
- Guard: `state`, `owner`, `reachability`, `reachable_state`, `bytecode`, `trusted_code`, `objects`.
- Run: `program`, `result`, `graph`, `phases`, `shadow`.
- Of a cache: `caches`, `cache_state`, `ragged`.
"""
