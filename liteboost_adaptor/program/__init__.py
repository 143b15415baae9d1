"""Decode steps: recorded once, guarded, and replayed in C++ (decision 22).

- Decide: `step`, `step_call`, `arguments`, `schedule`, `reasons`.
- Record: `attempt`, `record`, `recording` (the data), `functions`, `operators`, `tensors`, `execution`,
  `symbols`, `tracked`, `disguise`, `stand_in`, `casts`.
- Improve and lower: `passes`, `cpu_passes`, `npu_*`, `merged_weights`, `uses`, `lower`.
- Guard: `state`, `reach`, `reached`, `reading`, `known`, `objects`.
- Run: `program`, `result`, `graph`, `phases`, `shadow`.
- Of a cache: `caches`, `holders`, `ragged`.
"""
