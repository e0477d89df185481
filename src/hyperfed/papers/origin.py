"""Which cell of which table a record is of: the file ``experiment.json`` beside its settings."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hyperfed.errors import UserError, told
from hyperfed.system.files import atomic_write

FILE = "experiment.json"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Origin:
    """Where a record comes from.

    Attributes:
        table: ``paper/table``.
        cell: ``COLUMN-ROW``.
        scale: the part of the rounds that was run; 1.0 for all.
        command: what makes the record again; RUN is the folder that its first part prints.
        trained: the record, from this one's folder, of the training that was served here in
            another way; "" where this run was trained.
        superseded: why no verdict can be given by it any more, in a line; "" where one can.
    """

    table: str
    cell: str
    scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    command: str = ""
    trained: str = ""
    superseded: Annotated[str, Field(pattern=r"^[^\n\r|]*$")] = ""

    def write(self, folder: Path) -> None:
        """Writes the file.

        Raises:
            UserError: the disk is full, read-only or otherwise refuses.
        """
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        atomic_write(folder / FILE, f"{text}\n".encode())


_ORIGIN = TypeAdapter(Origin)


def read(folder: Path) -> Origin | None:
    """Reads a record's file; None where there is none.

    Raises:
        UserError: it is damaged.
    """
    path = folder / FILE
    try:
        return _ORIGIN.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise UserError(f"{path} must say of what a record is, but: {told(error)}") from error
