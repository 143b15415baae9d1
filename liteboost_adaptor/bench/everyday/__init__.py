"""Scripts of everyday use, without us and at level 2: ``python -m liteboost_adaptor.bench.everyday``.

Each is a function of a random model (``models``) so small that what is not arithmetic decides, and takes at
most some seconds without us. ``runner`` runs
every script in processes of its own, the two variants in turn, compares what they give, and sets the
processor time of one against that of the other: everything from `from_pretrained` to the end of the script,
so also what preparing a model and recording steps cost. ``script`` says what a script is; the other modules
have them by subject.
"""
