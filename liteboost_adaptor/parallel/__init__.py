"""Several processes: one model sharded over ranks, and work shared by them.

Packages, each of which imports only those before it, and modules that use all of them:

- `runtime`: ranks, process groups, the device mesh, collectives of Python objects, liveness of ranks.
- `tensor`: tensor parallelism. The plan of what is sharded, the layers that run on shards.
- `sequence`: ranks share the tokens of a prompt (ring attention, Ulysses).
- `data`: replicas share the rows of a batch; a sharded model becomes unsharded again.
- `checkpoint`: what a rank reads, saving, checkpoints that are sharded offline.
- `synchronize`, `shard`, `from_pretrained`: calls that ranks make together, sharding a model that is loaded,
  and sharding it as it is loaded.
"""
