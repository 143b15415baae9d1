"""Methods of caches and of their layers that somebody exchanges."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "cache_update_on_the_instance",
    between="""
        former = user.cache.update
        user.cache.update = lambda k, v, *a, **kw: former(k, v * @v, *a, **kw)
    """,
    back="vars(user.cache).pop('update', None)",
)
add(
    "layer_update_on_the_instance",
    between="""
        former = user.cache.layers[0].update
        user.cache.layers[0].update = lambda k, v, *a, **kw: former(k, v * @v, *a, **kw)
    """,
    back="vars(user.cache.layers[0]).pop('update', None)",
)
add(
    "length_on_the_instance",
    between="user.cache.get_seq_length = lambda *a, **kw: 3",
    back="vars(user.cache).pop('get_seq_length', None)",
)
add(
    "mask_sizes_on_the_instance",
    between="""
        former = user.cache.get_mask_sizes
        user.kept['calls@n'] = []

        def sizes(*args, **kwargs):
            user.kept['calls@n'].append(1)
            return former(*args, **kwargs)

        user.cache.get_mask_sizes = sizes
    """,
    end="user.log.append(len(user.kept.get('calls@n', ())))",
)
add(
    "fresh_cache_with_a_patch",
    between="""
        fresh = DynamicCache()
        former = fresh.update
        fresh.update = lambda k, v, *a, **kw: former(k, v * @v, *a, **kw)
        user.cache = user.args["past_key_values"] = fresh
        model(user.ids[:, :6], past_key_values=fresh, use_cache=True)
        user.args.pop("attention_mask", None)
        user.args.pop("position_ids", None)
    """,
)
add(
    "layer_class_patched",
    module="""
        def doubled_@n(original):
            def update(self, keys, values, *args, **kwargs):
                keys, values = original(self, keys, values, *args, **kwargs)
                return keys, values * @v

            return update
    """,
    between="""
        DynamicLayer.update = user.module.doubled_@n(user.kept.setdefault('f@n', DynamicLayer.update))
    """,
    back="DynamicLayer.update = user.kept['f@n']",
)
add(
    "cache_class_patched",
    module="""
        def doubled_@n(original):
            def update(self, keys, values, *args, **kwargs):
                keys, values = original(self, keys, values, *args, **kwargs)
                return keys, values * @v

            return update
    """,
    between="""
        DynamicCache.update = user.module.doubled_@n(user.kept.setdefault('f@n', DynamicCache.update))
    """,
    back="del DynamicCache.update",
)
add(
    "base_cache_class_patched",
    module="""
        def doubled_@n(original):
            def update(self, keys, values, *args, **kwargs):
                keys, values = original(self, keys, values, *args, **kwargs)
                return keys, values * @v

            return update
    """,
    between="Cache.update = user.module.doubled_@n(user.kept.setdefault('f@n', Cache.update))",
    back="Cache.update = user.kept['f@n']",
)
add(
    "class_length_patched",
    between="""
        former = user.kept.setdefault('f@n', Cache.get_seq_length)
        user.kept['calls@n'] = []

        def length(self, *args, **kwargs):
            user.kept['calls@n'].append(1)
            return former(self, *args, **kwargs)

        Cache.get_seq_length = length
    """,
    back="Cache.get_seq_length = user.kept['f@n']",
    end="user.log.append(len(user.kept.get('calls@n', ())))",
)
add(
    "cache_class_exchanged",
    module="""
        class Louder_@n(DynamicCache):
            def update(self, keys, values, *args, **kwargs):
                keys, values = super().update(keys, values, *args, **kwargs)
                return keys, values * @v
    """,
    between="""
        user.kept['c@n'] = type(user.cache)
        user.cache.__class__ = user.module.Louder_@n
    """,
    back="user.cache.__class__ = user.kept['c@n']",
)
add(
    "own_cache_class",
    module="""
        class Mine_@n(DynamicCache):
            calls = 0

            def update(self, keys, values, *args, **kwargs):
                type(self).calls += 1
                return super().update(keys, values, *args, **kwargs)
    """,
    between="""
        made = user.module.Mine_@n()
        made.layers = copy.deepcopy(user.cache).layers
        user.cache = user.args["past_key_values"] = made
    """,
    end="user.log.append(user.module.Mine_@n.calls)",
)
