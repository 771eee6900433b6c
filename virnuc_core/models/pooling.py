"""From hidden states of packed tokens to one vector a sequence."""

import torch
from torch import Tensor

from virnuc_core.models.kernels import has_kernels


def mean_pool(hidden_states: Tensor, cu_seqlens: Tensor, *, specials: bool) -> Tensor:
    """The mean hidden state of each sequence, summed in fp32.

    Each sequence is summed on its own, token after token, so its mean does not depend on its batch mates.

    Args:
        hidden_states: (T, D), any floating dtype.
        cu_seqlens: int32 (B + 1,) on the same device.
        specials: True averages every token (DNABERT-S, [CLS] and [SEP] included); False leaves out the
            first and last token of each sequence (ESM-2, BOS and EOS).

    Returns:
        fp32 (B, D). A sequence with nothing to average gives zeros.
    """
    if has_kernels(hidden_states.device) and not torch.is_grad_enabled():
        means: Tensor = torch.ops.virnuc.segment_mean(hidden_states, cu_seqlens, specials)
        return means
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if specials:
        offsets = cu_seqlens.long()
        counts = ends - starts
        sums = torch.segment_reduce(hidden_states.float(), "sum", offsets=offsets, axis=0)
    else:
        # Three segments a sequence: its first token, its residues, its last token. Each bound is kept
        # within the sequence, so that one without residues has an empty middle.
        first_residue = torch.minimum(starts + 1, ends)
        last_residue = torch.maximum(ends - 1, first_residue)
        bounds = torch.stack((starts, first_residue, last_residue), dim=1).flatten()
        offsets = torch.cat((bounds, cu_seqlens[-1:].long()))
        counts = last_residue - first_residue
        sums = torch.segment_reduce(hidden_states.float(), "sum", offsets=offsets, axis=0)[1::3]
    return sums / counts.clamp(min=1).unsqueeze(1)
