"""The one batch type: token sequences laid end to end, for either model."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """Token ids of n sequences, special tokens included, stored end to end.

    Attributes:
        input_ids: int32 (T,).
        offsets: int64 (n + 1,); sequence i is input_ids[offsets[i]:offsets[i + 1]].
    """

    input_ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """int64 (n,): tokens of each sequence."""
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B sequences of T tokens in all, without padding.

    Attributes:
        input_ids: int32 (T,).
        cu_seqlens: int32 (B + 1,); sequence i is input_ids[cu_seqlens[i]:cu_seqlens[i + 1]].
        max_seqlen: tokens of the longest sequence.
        rows: int64 (B,); row of each sequence in the column that was packed.
    """

    input_ids: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    max_seqlen: int
    rows: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch, T."""
        return len(self.input_ids)
