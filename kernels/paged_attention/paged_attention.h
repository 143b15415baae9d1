// paged_attention: attention of many requests at once, whose keys and values lie in the pages of one cache.
//
//   query         [tokens, H, D]: the queries of the requests, one request after the other
//   key           [pages, page_rows, K, D], value [pages, page_rows, K, Dv]; read in place at any strides with adjacent
//                 channels, else copied. Query head h reads kv head h / (H / K). All in one dtype: float32, bfloat16 or
//                 float16.
//   cu_seqlens_q  [n + 1]: request r has the queries cu_seqlens_q[r] up to cu_seqlens_q[r + 1]; begins with 0, does
//                 not fall. A request may have none.
//   cu_seqlens_k  [n + 1]: the same of the keys, of which request r has cu_seqlens_k[r + 1] - cu_seqlens_k[r]
//   block_table   [n, most pages]: key j of request r lies in row j % page_rows of page block_table[r][j / page_rows].
//                 Entries behind the last page of a request are not read; two requests may share pages. Without a table
//                 there is one page, in which the keys of the requests lie one after the other, as the queries do.
//   returns       [tokens, H, Dv], contiguous; 0 for queries that no request has
//
// cu_seqlens and block_table are int32 or int64, on the CPU or beside the query; on the CPU and where they lie on the
// CPU they are checked against the sizes, all before anything is read.
//
// Of each request the result is that of attention.h, with its rounding: causal from the end (query i of q stands at
// position i + kv - q), sliding window, softcap, sinks [H].
//
// Source: the paged cache of Kwon et al. 2023, arXiv:2309.06180; flash_attn_varlen_func of flash-attention, whose
// arguments these are. No backward.
#pragma once
