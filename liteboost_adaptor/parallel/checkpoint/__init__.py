"""What a rank reads of a checkpoint, how a sharded model is saved, checkpoints sharded offline."""
