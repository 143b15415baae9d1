"""Counters, iterators and queues that a step itself advances."""

from __future__ import annotations

from ..idiom import OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "class_counter",
    module="""
        class Count_@n:
            steps = 0
    """,
    forward="""
        Count_@n.steps += 1
        x = x * (1 + 0.01 * Count_@n.steps)
    """,
    end="user.log.append(Count_@n.steps)",
)
add(
    "global_counter",
    module="""
        STEPS_@n = 0

        def count_@n():
            global STEPS_@n
            STEPS_@n += 1
            return STEPS_@n
    """,
    forward="x = x * (1 + 0.01 * count_@n())",
    end="user.log.append(user.module.STEPS_@n)",
)
add(
    "silent_global_counter",
    module="STEPS_@n = [0]",
    forward="STEPS_@n[0] += 1",
    end="user.log.append(STEPS_@n[0])",
)
add(
    "silent_class_counter",
    module="""
        class Count_@n:
            steps = 0
    """,
    forward="Count_@n.steps += 1",
    end="user.log.append(Count_@n.steps)",
)
add(
    "attribute_counter",
    init="self.steps_@n = 0",
    forward="""
        self.steps_@n += 1
        x = x * (1 + 0.01 * self.steps_@n)
    """,
)
add(
    "silent_attribute_counter",
    init="self.steps_@n = 0",
    forward="self.steps_@n += 1",
)
add(
    "counter_of_tokens",
    sites=OUTER,
    module="COUNT_@n = collections.Counter()",
    forward="""
        if ids is not None:
            COUNT_@n.update(ids[0].tolist())
    """,
    end="user.log.append(COUNT_@n)",
)
add(
    "nonlocal_counter",
    module="""
        def made_@n():
            steps = 0

            def count():
                nonlocal steps
                steps += 1
                return steps

            return count

        COUNT_@n = made_@n()
    """,
    forward="x = x * (1 + 0.01 * COUNT_@n())",
    end="user.log.append(COUNT_@n())",
)
add(
    "function_attribute_counter",
    module="""
        def count_@n():
            count_@n.steps += 1
            return count_@n.steps

        count_@n.steps = 0
    """,
    forward="x = x * (1 + 0.01 * count_@n())",
)
add(
    "default_argument_counter",
    module="""
        def count_@n(seen=[]):
            seen.append(1)
            return len(seen)
    """,
    forward="x = x * (1 + 0.01 * count_@n())",
)
add(
    "itertools_count",
    module="COUNT_@n = itertools.count()",
    forward="x = x * (1 + 0.01 * next(COUNT_@n))",
    end="user.log.append(next(COUNT_@n))",
)
add(
    "itertools_cycle",
    module="CYCLE_@n = itertools.cycle([1.0, @v, 0.9])",
    forward="x = x * next(CYCLE_@n)",
)
add(
    "list_iterator",
    module="ITERATOR_@n = iter([1 + i * 0.01 for i in range(300)])",
    forward="x = x * next(ITERATOR_@n)",
)
add(
    "attribute_iterator",
    init="self.iterator_@n = iter(range(300))",
    forward="x = x * (1 + 0.01 * next(self.iterator_@n))",
)
add(
    "generator",
    module="""
        def numbers_@n():
            value = 1.0
            while True:
                yield value
                value = value * 0.99 + 0.02

        NUMBERS_@n = numbers_@n()
    """,
    forward="x = x * next(NUMBERS_@n)",
)
add(
    "generator_sent_to",
    module="""
        def mean_@n():
            total, count = 0.0, 0
            while True:
                value = yield total / max(count, 1)
                total, count = total + value, count + 1

        MEAN_@n = mean_@n()
        next(MEAN_@n)
    """,
    forward="x = x + 0.1 * math.tanh(MEAN_@n.send(float(x.mean())))",
)
add(
    "deque_rotated",
    module="DEQUE_@n = collections.deque([0.9, 1.0, 1.1])",
    forward="""
        DEQUE_@n.rotate(1)
        x = x * DEQUE_@n[0]
    """,
)
add(
    "deque_attribute",
    init="self.seen_@n = collections.deque(maxlen=4)",
    forward="""
        self.seen_@n.append(x.shape[1])
        x = x * (1 + 0.01 * len(self.seen_@n))
    """,
)
add(
    "queue_turned",
    module="""
        QUEUE_@n = queue.Queue()
        for _value in (0.9, 1.0, 1.2):
            QUEUE_@n.put(_value)
    """,
    forward="""
        factor = QUEUE_@n.get()
        QUEUE_@n.put(factor)
        x = x * factor
    """,
)
add(
    "heap",
    module="HEAP_@n = [0]",
    forward="""
        heapq.heappush(HEAP_@n, heapq.heappop(HEAP_@n) + 1)
        x = x * (1 + 0.01 * HEAP_@n[0])
    """,
)
add(
    "list_popped",
    module="LIST_@n = [i * 0.01 for i in range(300)]",
    forward="x = x * (1 + LIST_@n.pop())",
)
add(
    "dict_popped",
    module="DICT_@n = dict.fromkeys(range(300))",
    forward="x = x * (1 + 0.001 * DICT_@n.popitem()[0])",
)
add(
    "slots_counter",
    module="""
        class Counter_@n:
            __slots__ = ("steps",)

            def __init__(self):
                self.steps = 0

            def __call__(self):
                self.steps += 1
                return self.steps
    """,
    init="self.count_@n = Counter_@n()",
    forward="x = x * (1 + 0.01 * self.count_@n())",
    end="user.log.append([p.count_@n.steps for p in model.modules() if hasattr(p, 'count_@n')])",
)
add(
    "numpy_counter",
    init="self.count_@n = np.zeros(1)",
    forward="""
        self.count_@n += 1
        x = x * (1 + 0.01 * self.count_@n[0].item())
    """,
)
add(
    "context_variable_counter",
    module="STEPS_@n = contextvars.ContextVar('steps', default=0)",
    forward="""
        STEPS_@n.set(STEPS_@n.get() + 1)
        x = x * (1 + 0.01 * STEPS_@n.get())
    """,
    end="user.log.append(STEPS_@n.get())",
)
add(
    "parameter_attribute_counter",
    forward="""
        first = next(self.parameters())
        first.steps_@n = getattr(first, "steps_@n", 0) + 1
        x = x * (1 + 0.01 * first.steps_@n)
    """,
)
