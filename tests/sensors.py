"""Thirty people and their sensors: a table of the shape that such data have, and a network."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

PEOPLE = tuple(f"person {number:02d}" for number in range(1, 31))
ACTIVITIES = ("lying", "sitting", "stairs down", "stairs up", "standing", "walking")
CHANNELS, READINGS = 9, 128


def windows(each: int = 6) -> pd.DataFrame:
    """Windows of 9 channels x 128 readings, ``each`` of every person, one activity after another.

    An activity is a frequency, and a person a sign.
    """
    rng = np.random.default_rng(0)
    number = np.arange(each * len(PEOPLE))
    person, activity = number % len(PEOPLE), number // len(PEOPLE) % len(ACTIVITIES)
    time = np.arange(READINGS) / READINGS
    waves = np.sin(2 * np.pi * 2 * (activity[:, None] + 1) * time) * (-1.0) ** person[:, None]
    x = waves[:, None] + 0.5 * rng.normal(size=(len(number), CHANNELS, READINGS))
    return pd.DataFrame(
        {
            "person": [PEOPLE[own] for own in person],
            "window": [[channel.tolist() for channel in window.astype(np.float32)] for window in x],
            "activity": [ACTIVITIES[label] for label in activity],
        }
    )


class SensorNet(nn.Module):
    """Six activities from windows of 9 channels x 128 readings; begins with a convolution."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(CHANNELS, width, kernel_size=9, stride=4)
        self.classify = nn.Linear(width, len(ACTIVITIES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(torch.relu(self.convolve(x)).amax(dim=2))


NETS = Path(__file__)
"""The file of ``SensorNet``, for ``task.model``."""
