"""What transformers' assisted decoding asks for candidates: the text so far, or a draft model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    PromptLookupCandidateGenerator,
)

from .ngrams import BOUNDARY, SIZES, NgramIndex
from .pace import LENGTHS, Pace


class _Paced:
    """Counts of one `generate`, and how many candidates its next step may have.

    Attributes:
        verified: Length of the text that the model has chosen.
        pending: How many candidates the next step checks.
        steps, proposed, accepted, pauses: What became of the candidates.
    """

    def _begin(self, pace: Pace, verified: int) -> None:
        self.pace, self.verified, self.pending = pace, verified, 0
        self.steps = self.proposed = self.accepted = self.pauses = 0
        self._is_prompt = True

    def _room(self, length: int, longest: int) -> int:
        """How many candidates may be proposed behind ``length`` tokens; none with the prompt.

        So the prompt is computed as it is without candidates.
        """
        self.pending = 0
        if self._is_prompt:
            self._is_prompt = False
            return 0
        return min(self.pace.candidates(length), longest - length - 1)

    def _propose(self, count: int) -> None:
        self.pending = count

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        """Told by transformers what became of them; ``num_matches`` is a number or a tensor of one."""
        self.verified = input_ids.shape[1]
        if not self.pending:
            return
        accepted, before = int(num_matches), self.pace.resumes_at
        self.pace.judge(self.pending, accepted, self.verified)
        self.steps, self.proposed = self.steps + 1, self.proposed + self.pending
        self.accepted += accepted
        self.pauses += self.pace.resumes_at != before


class LookupCandidates(_Paced, PromptLookupCandidateGenerator):
    """Candidates that followed the last tokens before, in the text or in an encoder's."""

    def __init__(
        self, max_length: int, eos: frozenset[int], verified: int, source: list[int], pace: Pace
    ) -> None:
        PromptLookupCandidateGenerator.__init__(
            self,
            num_output_tokens=LENGTHS[-1],
            max_matching_ngram_size=SIZES[0],
            max_length=max_length,
        )
        self._begin(pace, verified)
        self._eos, self._known, self._index = eos, 0, NgramIndex()
        self._vocabulary = 0  # until the model has said it
        if source:
            self._index.extend([*source, BOUNDARY])

    def get_candidates(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        length = input_ids.shape[1]
        room = self._room(length, self.max_length)
        if room <= 0:
            return input_ids, None
        self._index.extend(input_ids[0, self._known :].tolist())
        self._known = length
        found = self._index.following(room)
        end = next((at for at, token in enumerate(found) if self._ends(token)), len(found))
        if not end:
            return input_ids, None
        self._propose(end)
        return torch.cat((input_ids, input_ids.new_tensor([found[:end]])), dim=1), None

    def _ends(self, token: int) -> bool:
        """Whether candidates end before ``token``."""
        # An older transformers may go on behind an end of text that is not the last token of a step. An
        # encoder may have read tokens that the model cannot say, and a prompt may have placeholders.
        return token in self._eos or not 0 <= token < self._vocabulary

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        """As of `_Paced`; ``scores`` are of all tokens that the model can say."""
        self._vocabulary = scores.shape[-1]
        super().update_candidate_strategy(input_ids, scores, num_matches)


class DraftCandidates(_Paced, AssistedCandidateGenerator):
    """Candidates that a smaller model generates."""

    def __init__(self, pace: Pace, verified: int, **given: Any) -> None:
        AssistedCandidateGenerator.__init__(self, **given)
        self._begin(pace, verified)
        self._longest = given["generation_config"].max_length
        # They are those of the prompt, and its first call comes later; `generate` counts them itself.
        self.assistant_kwargs.pop("position_ids", None)
        self._has_drafted = False

    def get_candidates(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        length = input_ids.shape[1]
        room = self._room(length, self._longest)
        if room <= 0:
            return input_ids, None
        mask = self.assistant_kwargs.get("attention_mask")
        if not self._has_drafted and mask is not None:
            more = mask.new_ones((mask.shape[0], length - mask.shape[1]))
            self.assistant_kwargs["attention_mask"] = torch.cat((mask, more), dim=1)
        self._has_drafted = True
        self.num_assistant_tokens = room
        found, logits = AssistedCandidateGenerator.get_candidates(self, input_ids)
        self._propose(found.shape[1] - length)
        return found, logits
