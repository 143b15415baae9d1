"""How many candidates the next step checks, and whether it checks any: decided by counts, never by time."""

from __future__ import annotations

from dataclasses import dataclass

#: Candidates of a step: few different numbers, so that steps of few sizes are made.
LENGTHS = (1, 3, 7, 15)
#: What a step of one token more costs, in steps of one token: weights are read once for all of them, so it
#: is their arithmetic and attention alone. Of Qwen3-0.6B's shape 0.03 to 0.12, two threads of a Zen 5.
COST_OF_TOKEN = 0.1
#: Seconds that candidates cost on the host in a step, by which a small model's gets dearer, and what a step
#: of one token takes: so many, and its bytes at this rate. Constants: a call takes the same steps anywhere.
HOST_SECONDS, STEP_SECONDS, BYTES_A_SECOND = 0.5e-3, 0.1e-3, 40e9
#: The most of `Pace.step` where candidates are looked for: in a pause a token costs the host a tenth of that.
MOST_STEP_COST = 0.25
#: In tokens: what may be lost before the first pause, what in a trial behind a pause, and the most credit.
FIRST_CREDIT, TRIAL_CREDIT, MOST_CREDIT = 1.0, 0.25, 2.0
#: In tokens: the first pause, and the longest; each is twice as long as the one before.
FIRST_PAUSE, LONGEST_PAUSE = 16, 512


@dataclass
class Pace:
    """The account of one text: accepted candidates are earned, those that were checked are paid for.

    Attributes:
        cost: What a candidate costs, in steps of one token.
        step: What a step that has some costs beside them, likewise.
        level: Index of `LENGTHS`.
        credit: In tokens; below zero a pause begins.
        resumes_at: Length of the text at which it ends.
        pause: How long the next one is.
    """

    cost: float = COST_OF_TOKEN
    step: float = 0.0
    level: int = 1
    credit: float = FIRST_CREDIT
    resumes_at: int = 0
    pause: int = FIRST_PAUSE

    def candidates(self, length: int) -> int:
        """How many the next step of a text of ``length`` tokens checks at most; 0 in a pause."""
        return 0 if length < self.resumes_at else LENGTHS[self.level]

    def judge(self, proposed: int, accepted: int, length: int) -> None:
        """Learn from a step that checked ``proposed`` candidates, behind which the text has ``length``."""
        self.credit = min(MOST_CREDIT, self.credit + accepted - self.cost * proposed - self.step)
        if accepted == proposed:
            # A short one, at the end of what was found, says nothing of longer ones.
            self.level = min(self.level + (proposed >= LENGTHS[self.level]), len(LENGTHS) - 1)
        elif 2 * accepted < proposed:
            self.level = max(self.level - 1, 0)
        if self.credit < 0:
            self.resumes_at, self.pause = length + self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.credit, self.level = TRIAL_CREDIT, 0
        elif self.credit == MOST_CREDIT:
            self.pause = FIRST_PAUSE


def step_cost(nbytes: int) -> float:
    """`Pace.step` of a model whose weights take so many bytes."""
    return HOST_SECONDS / (STEP_SECONDS + nbytes / BYTES_A_SECOND)
