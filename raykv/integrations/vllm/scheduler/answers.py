"""Learns whether later prompts contain an engine's answers. They never do if a chat template drops reasoning."""

from collections import OrderedDict, deque
from itertools import pairwise

SAMPLE = 64  # number of prompts in a row without the earlier answer; then answers are no longer stored
MOST = 4096  # maximum number of remembered answers


class Answers:
    """Learns from finished requests' chunks whether later prompts contain answers, even while no answer is stored."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()  # first chunk of an answer, by its prompt's last chunk
        self._went_on: deque[bool] = deque(maxlen=SAMPLE)  # whether prompts contained the earlier answer

    def learn(self, keys: list[bytes], prompt: int) -> None:
        """Learn from a finished request.

        keys: keys of the request's full chunks. prompt: number of chunks that the prompt fills.
        """
        for key, following in pairwise(keys[:prompt]):
            if (answer := self._answers.pop(key, None)) is not None:
                self._went_on.append(answer == following)
        if 0 < prompt < len(keys):
            self._answers[keys[prompt - 1]] = keys[prompt]
            if len(self._answers) > MOST:
                self._answers.popitem(last=False)

    @property
    def are_dropped(self) -> bool:
        """Whether the last SAMPLE continuations of earlier prompts all lacked the earlier answer."""
        return len(self._went_on) == SAMPLE and not any(self._went_on)
