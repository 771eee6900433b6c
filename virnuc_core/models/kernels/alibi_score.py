"""ALiBi as a score modification that flash-attn-4 compiles into its kernels; importing it needs their compiler."""

import cutlass
import cutlass.cute as cute


@cute.jit
def add_alibi(scores, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Scores of one query and a vector of keys, plus -slope * |i - j|; the slopes are fp32 (N,)."""
    slope = aux_tensors[0][head_idx[0]]
    distance = (q_idx - kv_idx).to(cutlass.Float32)
    nearer = cute.where(distance < cute.full_like(distance, 0.0), distance, -distance)
    return scores + nearer * slope
