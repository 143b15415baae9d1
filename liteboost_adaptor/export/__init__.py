"""A model as a folder that runs without Python: ``python -m liteboost_adaptor export``.

What `generate` calls, for prompts of each length and for each token behind them, is recorded as programs
(`program`), which ``liteboost-run`` (``runner/``) runs from the folder.
"""
