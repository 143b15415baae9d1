"""Rows of a cache that somebody keeps, copies, saves or reshapes."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "snapshot_kept",
    between="user.kept['k@n'] = [(l.keys, l.values) for l in user.cache.layers]",
    end="user.log.append(user.kept.get('k@n'))",
)
add(
    "snapshot_then_edit",
    between="user.kept['k@n'] = (user.cache.layers[0].keys, user.cache.layers[0].values)",
    back="""
        user.cache.layers[0].keys[:, :, 0].mul_(@v)
        user.cache.layers[0].values[:, :, 0].mul_(@v)
    """,
    end="user.log.append(user.kept.get('k@n'))",
)
add(
    "snapshot_edited",
    between="user.kept['k@n'] = user.cache.layers[0].keys",
    back="user.kept['k@n'].mul_(@v)",
    end="user.log.append(user.kept.get('k@n'))",
)
add(
    "view_of_a_snapshot_edited",
    between="user.kept['k@n'] = user.cache.layers[0].keys[:, :, :2]",
    back="user.kept['k@n'].mul_(@v)",
    end="user.log.append(user.kept.get('k@n'))",
)
add(
    "snapshot_restored",
    between="user.kept['k@n'] = [(l.keys, l.values) for l in user.cache.layers]",
    back="""
        for layer, (keys, values) in zip(user.cache.layers, user.kept['k@n']):
            layer.keys, layer.values = keys, values
    """,
)
add(
    "prefix_cache_from_a_snapshot",
    between="user.kept['k@n'] = [(l.keys, l.values) for l in user.cache.layers]",
    back="""
        fresh = DynamicCache()
        for at, (keys, values) in enumerate(user.kept['k@n']):
            fresh.update(keys, values, at)
        user.kept['fresh@n'] = fresh
        out = model(user.ids[:, :1], past_key_values=fresh, use_cache=True)
        user.log.append(out[0])
    """,
    end="user.log.append([l.keys for l in getattr(user.kept.get('fresh@n'), 'layers', [])])",
)
add(
    "deep_copied_cache",
    between="user.kept['c@n'] = copy.deepcopy(user.cache)",
    back="user.cache, user.kept['c@n'] = user.kept['c@n'], user.cache",
)
add(
    "shallow_copied_cache",
    between="user.kept['c@n'] = copy.copy(user.cache)",
    end="user.log.append(getattr(user.kept.get('c@n'), 'layers', [None])[0] is not None)",
)
add(
    "pickled_cache",
    between="user.cache = user.args['past_key_values'] = pickle.loads(pickle.dumps(user.cache))",
)
add(
    "two_caches_in_turn",
    each="""
        if user.step == 0:
            user.kept['c@n'] = copy.deepcopy(user.cache)
        if user.step > 0:
            user.cache, user.kept['c@n'] = user.kept['c@n'], user.cache
            user.args["past_key_values"] = user.cache
            user.args.pop("attention_mask", None)
            user.args.pop("position_ids", None)
    """,
)
add(
    "batch_repeated",
    between="user.cache.batch_repeat_interleave(1)",
)
add(
    "rows_selected",
    between="user.cache.batch_select_indices(torch.arange(user.ids.shape[0]))",
)
add(
    "cache_reset",
    raises=True,
    between="user.cache.reset()",
)
add(
    "keys_numpy",
    after="""
        if user.step % 9 == 3:
            user.log.append(float(user.cache.layers[0].keys.numpy().sum()))
    """,
)
add(
    "keys_numpy_edited",
    between="user.cache.layers[0].keys.numpy()[:, :, 0] *= @v",
)
add(
    "keys_viewed",
    between="user.log.append(user.cache.layers[0].keys.view(1, -1).sum())",
)
add(
    "keys_saved_as_safetensors",
    between="""
        from safetensors.torch import save
        user.log.append(len(save({"keys": user.cache.layers[0].keys})) > 0)
    """,
)
add(
    "keys_made_contiguous",
    between="user.log.append(user.cache.layers[0].keys.contiguous().view(1, -1).numpy().sum())",
)
add(
    "layer_type_asked",
    after="""
        if user.step % 9 == 3:
            cls = type(user.cache.layers[0])
            user.log.append((cls.__name__, cls in vars(cache_utils).values()))
    """,
)
add(
    "cache_iterated",
    raises=True,
    after="""
        if user.step % 9 == 3:
            user.log.append([[t for t in layer if torch.is_tensor(t)] for layer in user.cache])
    """,
)
add(
    "cache_without_rows",
    between="""
        user.cache = user.args['past_key_values'] = DynamicCache()
        user.args.pop('attention_mask', None)
        user.args.pop('position_ids', None)
    """,
)
add(
    "moved_to_another_dtype",
    between="""
        for layer in user.cache.layers:
            layer.keys, layer.values = layer.keys.double().float(), layer.values.clone()
    """,
)
add(
    "weak_reference_to_rows",
    between="""
        user.kept['w@n'] = []
        rows = user.cache.layers[0].keys.clone()
        weakref.finalize(rows, user.kept['w@n'].append, user.step)
        user.cache.layers[0].keys = rows
    """,
    end="user.log.append(user.kept.get('w@n'))",
)
add(
    "reference_given_up",
    between="user.kept['r@n'] = user.cache.layers[0].keys",
    back="""
        del user.kept['r@n']
        gc.collect()
    """,
)
