"""Threads, other caches and generation beside a step."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "called_in_a_thread",
    wrap="""
        mode, found = torch.is_inference_mode_enabled(), []

        def work():
            with torch.inference_mode() if mode else torch.no_grad():
                found.append(inner())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found[0]
    """,
)
add(
    "two_threads_two_caches",
    concurrent=True,
    wrap="""
        mode, other, found = torch.is_inference_mode_enabled(), user.kept.get('c@n'), []
        args = {**user.args, "past_key_values": other}

        def work():
            with torch.inference_mode() if mode else torch.no_grad():
                found.append(model(**args))

        thread = threading.Thread(target=work)
        thread.start()
        out = inner()
        thread.join()
        user.log.append(found[0][0] if found else "raised")
        return out
    """,
    between="user.kept['c@n'] = copy.deepcopy(user.cache)",
)
add(
    "context_copied",
    module="SCALE_@n = contextvars.ContextVar('scale', default=1.0)",
    forward="x = x * SCALE_@n.get()",
    wrap="""
        context = contextvars.copy_context()
        context.run(SCALE_@n.set, @v)
        return context.run(inner)
    """,
)
add(
    "generated_in_between",
    between="""
        made = model.generate(user.ids[:1, :4], max_new_tokens=12, do_sample=False, pad_token_id=0)
        user.log.append(made)
    """,
)
add(
    "sampled_in_between",
    between="""
        made = model.generate(user.ids[:1, :4], max_new_tokens=12, do_sample=True, pad_token_id=0)
        user.log.append(made.shape)
    """,
)
add(
    "beams_in_between",
    between="""
        options = {"num_beams": 2, "do_sample": False, "pad_token_id": 0}
        made = model.generate(user.ids[:1, :4], max_new_tokens=8, **options)
        user.log.append(made)
    """,
)
add(
    "forward_called_directly",
    wrap="""
        args = dict(user.args)
        return model.forward(**args)
    """,
)
add(
    "called_by_the_class",
    wrap="return type(model).__call__(model, **user.args)",
)
add(
    "called_twice",
    wrap="""
        twin = copy.deepcopy(user.cache)
        first = model(**{**user.args, "past_key_values": twin})
        user.log.append(first[0])
        return inner()
    """,
)
add(
    "length_asked_after",
    after="user.log.append(user.cache.get_seq_length() if user.cache is not None else None)",
)

add(
    "four_threads_in_a_pool",
    concurrent=True,
    forward="x = x + @v * torch.tanh(x)",
    module="POOL_@n = ThreadPoolExecutor(4)",
    between="""
        user.kept["c@n"] = [copy.deepcopy(user.cache) for _ in range(3)]
    """,
    wrap="""
        mode = torch.is_inference_mode_enabled()

        def work(cache):
            with torch.inference_mode() if mode else torch.no_grad():
                return model(**{**user.args, "past_key_values": cache})[0]

        futures = [POOL_@n.submit(work, cache) for cache in user.kept["c@n"]]
        out = inner()
        user.log.append([future.result() for future in futures])
        return out
    """,
    end="POOL_@n.shutdown()",
)
add(
    "changed_beside_a_thread",
    concurrent=True,
    module="SCALE_@n = [1.0]",
    forward="x = x * SCALE_@n[0]",
    wrap="""
        if user.step % 3 == 0:
            thread = threading.Thread(target=SCALE_@n.__setitem__, args=(0, 1.0 + 0.1 * user.step))
            thread.start()
            thread.join()
        return inner()
    """,
)
add(
    "threads_from_the_start",
    concurrent=True,
    module="""
        POOL_@n = ThreadPoolExecutor(4)

        def together_@n(model, user):
            mode = torch.is_inference_mode_enabled()
            start = threading.Barrier(3)

            def work(cache):
                start.wait()
                with torch.inference_mode() if mode else torch.no_grad():
                    return model(**{**user.args, "past_key_values": cache})

            caches = [user.cache, *user.kept["c@n"]]
            first, *others = [future.result() for future in [POOL_@n.submit(work, c) for c in caches]]
            user.log.append([out[0] for out in others])
            return first
    """,
    each="""
        if user.step == 0:
            user.kept["c@n"] = [copy.deepcopy(user.cache) for _ in range(2)]
            user.call = user.module.together_@n
    """,
    end="POOL_@n.shutdown()",
)
