"""What both trainings share: the time they have, averages of weights, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

CHECKPOINT_EVERY = 120  # seconds
REPORT_EVERY = 100  # steps


def say(text: str = "") -> None:
    """Prints a line at once, so that a log can be followed."""
    print(text, flush=True)


class Average:
    """A running mean of a module's weights, which draws better than the weights themselves."""

    def __init__(self, module: torch.nn.Module, decay: float = 0.998) -> None:
        """Starts at the module's weights."""
        self._module, self._decay = module, decay
        self.weights = {name: w.detach().clone() for name, w in module.named_parameters()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after step `step`; early steps are forgotten faster."""
        decay = min(self._decay, (step + 1) / (step + 10))
        weights = list(self._module.parameters())
        torch._foreach_lerp_(list(self.weights.values()), weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the mean in the place of the module's weights for a while."""
        own = {name: w.detach().clone() for name, w in self._module.named_parameters()}
        self.apply()
        yield
        self.weights, own = own, self.weights
        self.apply()
        self.weights = own

    @torch.no_grad()
    def apply(self) -> None:
        """Puts the mean in the place of the module's weights."""
        for name, weight in self._module.named_parameters():
            weight.copy_(self.weights[name])


class Clock:
    """Counts the steps and seconds of a training that may be stopped and taken up again."""

    def __init__(self, name: str, seconds: float, module: torch.nn.Module, folder: Path) -> None:
        """Prepares a training of `seconds` in all, kept in `folder`/`name`.pt."""
        self.step = 0
        self._name, self._seconds, self._module = name, seconds, module
        self._file = folder / f"{name}.pt"
        self._begin = self._saved = time.monotonic()
        self._smooth: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before a stop included."""
        return time.monotonic() - self._begin

    def running(self) -> bool:
        """Tells whether there is time left."""
        return self.elapsed < self._seconds

    def rate(self, climb: int) -> float:
        """Rises over the first `climb` steps, then falls along a cosine, to a fiftieth."""
        done = min(1.0, self.elapsed / self._seconds)
        return min(1.0, (self.step + 1) / climb) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))

    def restore(self, optimizer: torch.optim.Optimizer, average: Average) -> None:
        """Goes on where the checkpoint stopped, if there is one."""
        if not self._file.exists():
            return
        kept: dict[str, Any] = torch.load(self._file)
        self._module.load_state_dict(kept["weights"])
        optimizer.load_state_dict(kept["optimizer"])
        average.weights = kept["average"]
        self.step = kept["step"]
        self._begin = time.monotonic() - kept["elapsed"]
        say(f"{self._name}: goes on at step {self.step}, {self.elapsed:.0f} s")

    def tick(
        self, values: dict[str, float], optimizer: torch.optim.Optimizer, average: Average
    ) -> bool:
        """Ends a step: counts, reports, and now and then saves; tells whether it saved."""
        share = 1 / min(100, self.step + 1)
        for key, value in values.items():
            self._smooth[key] = (1 - share) * self._smooth.get(key, value) + share * value
        self.step += 1
        if self.step % REPORT_EVERY == 0 or not self.running():
            means = "  ".join(f"{key} {value:.4f}" for key, value in self._smooth.items())
            say(f"{self._name} {self.step:6d}  {means}  {self.elapsed:6.0f} s")
        if self.running() and time.monotonic() - self._saved < CHECKPOINT_EVERY:
            return False
        kept = {
            "weights": self._module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "average": average.weights,
            "step": self.step,
            "elapsed": self.elapsed,
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        torch.save(kept, part)
        part.replace(self._file)
        self._saved = time.monotonic()
        return True
