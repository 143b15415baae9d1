"""What clients ask a server for, and how they misbehave: drawn once, by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: The small model has 1,024 positions; a word is about two tokens.
LIMIT = 1024
#: The longest text of a request that is answered.
TOKENS = 16
#: Of a text that nobody waits for: far longer than the others, so that a server that goes on is noticed.
UNWANTED = 400
_WORDS = (
    "the king and queen of night shall come to thee with sword in hand what light is this that breaks upon "
    "my heart O speak again fair lord for I am but a poor soldier who would not stay nor go"
).split()

GREEDY, CANCELLED, VANISHED, MALFORMED = "greedy", "cancelled", "vanished", "malformed"
OVER, IMAGE, UNKNOWN = "over the limit", "image", "unknown model"
#: What part of the requests is of another kind than `GREEDY`.
SHARES = {CANCELLED: 0.05, MALFORMED: 0.02, OVER: 0.01, VANISHED: 0.01, IMAGE: 0.005, UNKNOWN: 0.005}
#: Bodies that are no request, and the status with which transformers refuses each.
MALFORMED_BODIES = (
    ('{"prompt": "half', 422),
    ("[1, 2]", 422),
    ('{"prompt": "a", "no_such_field": 1}', 422),
    ('{"prompt": ["a", "b"]}', 400),
    ("", 422),
    ("\x00\xff", 422),
)


@dataclass(frozen=True)
class Planned:
    """A request.

    Attributes:
        prompt: Its text.
        tokens: How many are asked for.
        stream: Whether they are wanted one by one.
    """

    number: int
    kind: str
    prompt: str
    tokens: int
    stream: bool


def prompts(count: int, seed: int) -> list[str]:
    """``count`` texts of 1 to 150 words."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(_WORDS, k=drawn.randint(1, 150))) for _ in range(count)]


def long_prompt(number: int) -> str:
    """A text of more tokens than the model has positions."""
    return " ".join(_WORDS[(number + place) % len(_WORDS)] for place in range(LIMIT))


def planned(count: int, seed: int, texts: list[str]) -> list[Planned]:
    """``count`` requests: of each kind the share that `SHARES` has, at least one, in a drawn order."""
    drawn = random.Random(seed)
    kinds = [kind for kind, share in SHARES.items() for _ in range(max(1, round(share * count)))]
    kinds += [GREEDY] * (count - len(kinds))
    drawn.shuffle(kinds)
    return [_request(number, kind, drawn, texts) for number, kind in enumerate(kinds)]


def _request(number: int, kind: str, drawn: random.Random, texts: list[str]) -> Planned:
    prompt = long_prompt(number % 2) if kind == OVER else drawn.choice(texts)
    tokens = UNWANTED if kind in (CANCELLED, VANISHED) else drawn.randint(1, TOKENS)
    return Planned(number, kind, prompt, tokens, kind == CANCELLED or drawn.random() < 0.5)
