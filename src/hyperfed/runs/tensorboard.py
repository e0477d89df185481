"""A run's evaluations as TensorBoard scalars, where TensorBoard is installed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hyperfed.runs.records import Evaluation
from hyperfed.system.files import refused

Record = Callable[[Mapping[str, Evaluation]], None]
"""Takes the evaluations of one round by split."""


@contextmanager
def scalars(folder: Path, after: int) -> Iterator[Record]:
    """Gives a function that writes evaluations to ``folder``; it does nothing without TensorBoard.

    Args:
        folder: for the event files; made where it does not exist.
        after: rounds done. Later ones, which a killed run may have left, are hidden.

    Raises:
        UserError: the disk is full, read-only or otherwise refuses.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield lambda _: None
        return

    def record(evaluations: Mapping[str, Evaluation]) -> None:
        try:
            for split, evaluation in evaluations.items():
                for name, number in _numbers(split, evaluation).items():
                    if number is not None:
                        writer.add_scalar(name, number, evaluation.round)
            writer.flush()
        except OSError as error:
            raise refused(folder, error) from error

    try:
        writer = SummaryWriter(str(folder), purge_step=after + 1)
    except OSError as error:
        raise refused(folder, error) from error
    try:
        yield record
    finally:
        with suppress(OSError):  # record() has flushed, or said that it cannot
            writer.close()


def _numbers(split: str, evaluation: Evaluation) -> dict[str, float | None]:
    return {
        f"accuracy/{split}": evaluation.accuracy,
        f"loss/{split}": evaluation.loss,
        f"worst_decile_accuracy/{split}": evaluation.worst_decile_accuracy,
        "bytes/down": evaluation.bytes_down,
        "bytes/up": evaluation.bytes_up,
    }
