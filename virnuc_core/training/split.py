"""Which records a head learns from, which say when to stop, and which nobody looks at before the end."""

import logging
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.errors import InputError

PARTS: Final = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)
_FEWEST_GROUPS: Final = 3

_log = logging.getLogger(__name__)


def split_records(
    is_viral: npt.NDArray[np.bool_],
    groups: npt.NDArray[np.int64],
    is_usable: npt.NDArray[np.bool_],
    held_out: float,
    seed: int,
) -> npt.NDArray[np.int8]:
    """Puts whole groups into the parts, so that no group is in two of them.

    Each class gives a share of its groups to validation and as many to the test, and at least one to each. Groups
    that hold both classes are learnt from: a virus in the genome of its host says nothing when it is held out.

    Args:
        is_viral: (R,).
        groups: (R,).
        is_usable: (R,), whether the record can be learnt from.
        held_out: share of the groups of a class for validation, and again for the test; below 0.5.
        seed: of the draw.

    Returns:
        int8 (R,), index into `PARTS`.

    Raises:
        InputError: a class has too few groups that can be learnt from.
    """
    both = np.intersect1d(groups[is_viral], groups[~is_viral])
    if len(both):
        _log.warning(
            "%d groups of related records hold viral and other records, such as a prophage and its host: they are learnt from "
            "and never held out",
            len(both),
        )
    part = np.full(len(groups), TRAIN, np.int8)
    rng = np.random.default_rng(seed)
    for viral, name in ((True, "viral"), (False, "other")):
        own = np.setdiff1d(groups[(is_viral == viral) & is_usable], both)
        if len(own) < _FEWEST_GROUPS:
            raise InputError(
                f"there are too few records to train on: {len(own)} groups of related {name} records that can be learnt from, "
                f"and at least {_FEWEST_GROUPS} are needed, one each to learn from, to validate and to test. Give more "
                f"--{name} records that are not alike."
            )
        each = min(max(1, round(held_out * len(own))), (len(own) - 1) // 2)
        drawn = rng.permutation(own)
        part[np.isin(groups, drawn[:each])] = VALIDATION
        part[np.isin(groups, drawn[each : 2 * each])] = TEST
    return part
