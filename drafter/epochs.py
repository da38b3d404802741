"""Reclamation by epochs: when may the writer overwrite a copy that readers may still be reading?

The writer counts publications; a reader pins the count while it drafts. A copy may go once every pin is newer than its replacement. A
reader that does not move on within the grace is passed over: it notices by the index's reclaimed version and drafts again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.layout import CONTROL_EPOCH, CONTROL_HEARTBEAT_NS, ROWS_PIN
from draftd.drafter.ops.intrinsics import observe, publish

_GRACE_S = 0.05
_POLL_S = 0.0002


@dataclass(slots=True)
class Epochs:
    """The writer's side of the control block and of every reader's pin.

    Attributes:
        control: int64 [CONTROL_WORDS], the control block.
        passed_over: Times that a reader was not waited for any longer.
    """

    control: NDArray[np.int64]
    passed_over: int = 0
    _pins: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    _stuck: dict[str, int] = field(default_factory=dict)

    def add_reader(self, name: str, header: NDArray[np.int64]) -> None:
        """Waits for this reader from now on; `header` is the block whose word ROWS_PIN it pins with."""
        self._pins[name] = header

    def remove_reader(self, name: str) -> None:
        """Forgets a reader."""
        self._pins.pop(name, None)
        self._stuck.pop(name, None)

    def beat(self) -> None:
        """Shows readers that the writer lives."""
        publish(self.control, CONTROL_HEARTBEAT_NS, time.monotonic_ns())

    def advance(self) -> int:
        """Counts a publication and answers the new epoch. Call it after the publication is visible."""
        epoch = int(self.control[CONTROL_EPOCH]) + 1
        publish(self.control, CONTROL_EPOCH, epoch)
        return epoch

    def wait_for_readers(self, epoch: int) -> None:
        """Returns when no reader that moves is drafting from before `epoch`; at most the grace per reader that does not move."""
        deadline = time.monotonic() + _GRACE_S
        for name, header in list(self._pins.items()):
            while True:
                pin = int(observe(header, ROWS_PIN))
                if pin == 0 or pin >= epoch:
                    self._stuck.pop(name, None)
                    break
                if self._stuck.get(name) == pin:
                    break
                if time.monotonic() > deadline:
                    self._stuck[name] = pin
                    self.passed_over += 1
                    break
                time.sleep(_POLL_S)
