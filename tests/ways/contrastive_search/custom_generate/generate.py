"""Contrastive search (Su et al., 2022), which transformers no longer carries: the hub holds it as code.

Of the ``top_k`` likeliest tokens the one is taken whose probability, less how much its hidden state
resembles those of the context, is the largest.
"""

import copy

import torch


@torch.no_grad()
def generate(model, input_ids, attention_mask=None, max_new_tokens=8, top_k=4, penalty_alpha=0.6, **unused):
    """Sequences ``[batch, length + max_new_tokens]``; the arguments are those of ``model.generate``."""
    ids, mask = input_ids, attention_mask if attention_mask is not None else torch.ones_like(input_ids)
    batch = ids.shape[0]
    out = model(input_ids=ids, attention_mask=mask, use_cache=True, output_hidden_states=True)
    cache, logits, context = out.past_key_values, out.logits[:, -1], out.hidden_states[-1]
    for _ in range(max_new_tokens):
        probabilities, candidates = logits.float().softmax(-1).topk(top_k)
        branches = copy.deepcopy(cache)
        branches.batch_repeat_interleave(top_k)
        mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
        out = model(
            input_ids=candidates.reshape(-1, 1),
            attention_mask=mask.repeat_interleave(top_k, dim=0),
            past_key_values=branches,
            use_cache=True,
            output_hidden_states=True,
        )
        states = out.hidden_states[-1].reshape(batch, top_k, -1)
        likeness = torch.cosine_similarity(states[:, :, None], context[:, None], dim=-1)
        likeness = likeness.masked_fill(mask[:, None, :-1] == 0, -1.0).amax(-1)
        chosen = ((1 - penalty_alpha) * probabilities - penalty_alpha * likeness).argmax(-1)
        rows = torch.arange(batch)
        cache = out.past_key_values
        cache.batch_select_indices(rows * top_k + chosen)
        logits = out.logits[:, -1].reshape(batch, top_k, -1)[rows, chosen]
        context = torch.cat([context, states[rows, chosen][:, None]], dim=1)
        ids = torch.cat([ids, candidates[rows, chosen][:, None]], dim=1)
    return ids
