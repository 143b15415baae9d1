// kv_append: new keys and values into their places of a cache, which it writes to and nothing else.
//
//   keys[slot / block_size, h, slot % block_size] = key[b, h, t],  slot = slots[b, t];  values likewise
//
//   keys     [blocks, kv_heads, block_size, head_dim]; float32, bfloat16 or float16. Any strides with adjacent channels
//            and no dimension expanded: heads may lie before places ([B, H, capacity, D]) or behind them (a transposed
//            view of [B, capacity, H, D]). A cache of one row a sequence has a block a sequence and block_size =
//            capacity; a paged one has more, smaller blocks.
//   values   [blocks, kv_heads, block_size, value_dim], dtype of keys, in memory of their own
//   key      [batch, kv_heads, q_len, head_dim], dtype of keys, not in the memory of either cache; read in place at any
//            strides with adjacent channels, else copied
//   value    [batch, kv_heads, q_len, value_dim], the same
//   slots    int64 [batch, q_len]: each in 0 .. blocks * block_size - 1, no two the same. Two that are the same leave one
//            of their tokens, or a mixture, there. On the CPU the range is checked before anything is written; on an NPU
//            it is not, because the host would have to wait for the device.
//   returns  nothing; bits are copied
//
// Source: the paged cache of Kwon et al. 2023, arXiv:2309.06180; StaticLayer.update of transformers 5.23. No backward.
#pragma once
