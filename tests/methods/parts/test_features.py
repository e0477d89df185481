"""What features come to, class by class."""

import torch

from hyperfed.methods.parts.features import class_means
from hyperfed.training import arithmetic


def test_means_of_classes_are_in_full_where_clients_compute_in_bfloat16() -> None:
    """Rounded, near features would vary by more than they do, or by less than nothing."""
    draw = torch.Generator().manual_seed(0)
    features, y = 3 + 0.02 * torch.randn(200, 16, generator=draw), torch.arange(200) % 3
    expected = torch.stack([features[y == label].mean(dim=0) for label in range(3)])
    with arithmetic("bf16"):
        means, count = class_means(features, y, 4)
    torch.testing.assert_close(means, torch.cat([expected, torch.zeros(1, 16)]))
    assert count.tolist() == [67, 67, 66, 0]
