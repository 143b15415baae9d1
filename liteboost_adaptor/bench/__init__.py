"""What ``python -m liteboost_adaptor bench`` runs.

``models`` writes a weight file of a real architecture and counts what a pass over it must cost; ``worker`` is
one variant in a process of its own; ``agreement`` compares what the variants compute; ``limits`` measures
what the machine can do; ``runner`` hands out the rounds; ``report`` makes figures of them. ``ops`` times
single ops, ``perplexity`` reads a real text, ``everyday`` runs scripts of everyday use, ``serving`` a
server with its clients.
"""
