"""Finds targets in a model and swaps them for replacements; knows no model and no op.

Read in this order. `bind.Binder.bind` is the entry.

- `catalogue`: rule files -> `Rule`.
- `fit`: which rule fits a target, by `fingerprint` (what code computes; `source`: its syntax tree) or
  `probe`.
- `rewrite`, with `expressions`, `appends`, `later_patch`: a method with some expressions rerouted.
- `guarded`, with `callees`, `lookups`: the original runs where somebody has replaced what it calls.
- `swap`: an instance gets a subclass. `undo_stack`, `hooks`: what is set outside of models, and undo.
"""
