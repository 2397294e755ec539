"""Whether later prompts contain an engine's answers. If a chat template drops reasoning, prompts never do."""

from collections import OrderedDict, deque
from itertools import pairwise

SAMPLE = 64  # answers are not stored once so many prompts in a row lacked the earlier answer
MOST = 4096  # answers that are remembered


class Answers:
    """Learns from finished requests' chunks whether later prompts contain answers, even while none is stored."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()  # by a prompt's last chunk, the chunk after it
        self._went_on: deque[bool] = deque(maxlen=SAMPLE)  # whether an earlier prompt's answer came next

    def learn(self, keys: list[bytes], prompt: int) -> None:
        """A request is finished. keys: of its full chunks. prompt: the number of chunks that its prompt fills."""
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
