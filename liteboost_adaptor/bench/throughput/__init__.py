"""``bench --serve``: requests that ``generate_batch``, continuous batching, answers all at once; and peers.

``runner`` hands out the rounds, ``peers`` starts llama.cpp and vLLM, ``report`` makes figures of them.
"""
