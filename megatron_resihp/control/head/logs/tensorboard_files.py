# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's files, by torch's own writer, as Megatron writes them. May import torch and `protocol`."""

from typing import Any

from megatron_resihp.control.head.logs.writer import MissingPackageError
from megatron_resihp.protocol.logs import LogPage, TensorBoardWish


class TensorBoardFiles:
    """The files of one directory."""

    def __init__(self, wish: TensorBoardWish) -> None:
        try:
            # An optional package, and torch with it: only where logs are wanted.
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"--tensorboard-dir needs the package tensorboard where the coordinator runs ({error}); "
                "no TensorBoard logs are written"
            ) from None
        self._writer: Any = SummaryWriter(log_dir=wish.directory, max_queue=wish.queue_size)

    def write(self, page: LogPage) -> None:
        for tag, value, step in page.scalars:
            self._writer.add_scalar(tag, value, step, walltime=page.time)
        for tag, text, at in page.texts:
            self._writer.add_text(tag, text, at, walltime=page.time)
        # Only then is it known whether the disk has taken them: torch's writer writes in a thread.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
