"""Which tokens followed the last ones of a text before: an index that grows with the text."""

from __future__ import annotations

from collections.abc import Sequence

#: Tokens that are looked up: the longer first.
SIZES = (3, 2)
#: Separates texts: no token.
BOUNDARY = -1


class NgramIndex:
    """Where each run of `SIZES` tokens was last followed by another.

    transformers compares the last tokens with all of the text at every step; this looks them up in a dict.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in SIZES)

    def extend(self, tokens: Sequence[int]) -> None:
        """Put ``tokens`` behind the text."""
        known, text = len(self.tokens), self.tokens
        text.extend(tokens)
        for size, after in zip(SIZES, self._after, strict=True):
            # Runs that have a token behind them, which is one of the new ones. Of equal ones the last stays.
            first = max(known, size)
            if first >= len(text):
                continue
            runs = zip(*(text[first - size + at : len(text) - size + at] for at in range(size)), strict=True)
            after.update(zip(runs, range(first, len(text)), strict=True))

    def following(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the last ones before; a text that repeats is followed on."""
        text, length = self.tokens, len(self.tokens)
        for size, after in zip(SIZES, self._after, strict=True):
            start = after.get(tuple(text[length - size :])) if length > size else None
            if start is None:
                continue
            found = text[start : start + count]
            while len(found) < count:  # it reaches its own beginning: the text goes round
                found.append(found[len(found) - (length - start)])
            return found[: found.index(BOUNDARY)] if BOUNDARY in found else found
        return []
