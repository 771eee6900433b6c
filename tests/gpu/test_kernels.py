"""virnuc's kernels on a GPU against plain torch in fp64."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernel_checks import (
    DEVICE,
    ERROR,
    IF_FLASH_ATTN,
    attend,
    check_add_norm,
    check_attention,
    check_attention_in_fp8,
    check_batch_mates,
    check_embedding,
    check_fp8_product,
    check_product,
    check_segment_mean,
    random,
    reference,
    relative_error,
)
from virnuc_core.models.attention import alibi_slopes
from virnuc_core.models.encoders import mean_pool
from virnuc_core.models.kernels import attention, gemm_gelu
from virnuc_core.specs import AttentionBackend

pytestmark = pytest.mark.gpu

LENGTHS = {
    "one token": [1],
    "around the borders": [1, 2, 15, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 1, 1024],
    "equal": [168] * 50,
    "mixed": [*range(1, 1_100, 37), 383, 384, 385, 448, 449, 511, 512, 513, 640, 641, 1_100],
    "long": [10_000, 30, 3_001],
    "very long": [40_000],
}


@pytest.mark.parametrize("backend", ["triton", pytest.param("flash-attn", marks=IF_FLASH_ATTN)])
@pytest.mark.parametrize("positions", ["rotary", "alibi"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.float16), (64, torch.bfloat16), (16, torch.float16), (24, torch.float16), (32, torch.float16),
     (128, torch.float16), (128, torch.bfloat16)],
)  # fmt: skip
def test_kernels_equal_the_reference(
    head_dim: int, dtype: torch.dtype, lengths: list[int], positions: str, backend: AttentionBackend
) -> None:
    check_attention(lengths, positions, head_dim, dtype, backend)


@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_a_sequence_gets_the_same_bits_in_any_batch(positions: str) -> None:
    check_batch_mates(LENGTHS["mixed"], positions)


@pytest.mark.parametrize("num_tokens", [932_100, 3_000_000])
def test_a_sequence_beyond_int32_offsets(num_tokens: int) -> None:
    """DNABERT-S: QKV offsets exceed int32 from 932,068 tokens, output offsets from 2,796,203."""
    num_heads, head_dim = 12, 64
    qkv = torch.empty(num_tokens, 3, num_heads, head_dim, dtype=torch.float16, device=DEVICE)
    qkv.normal_(generator=torch.Generator("cuda").manual_seed(0))
    slopes = alibi_slopes(num_heads).to(DEVICE)
    short, long = attention.plan_tiles(np.array([0, num_tokens], np.int32))
    chosen = long[[0, len(long) // 2, -2, -1]]
    # More tiles than two grid dimensions can hold, nearly all empty.
    tiles = np.concatenate((np.zeros((66_000, 3), np.int32), chosen))
    actual = torch.ops.virnuc.packed_attention(
        qkv, torch.from_numpy(short).to(DEVICE), torch.from_numpy(tiles).to(DEVICE), None, slopes
    ).view(num_tokens, num_heads, head_dim)
    at = torch.arange(num_tokens, device=DEVICE, dtype=torch.float32)
    for head in range(num_heads):
        q, k, v = qkv[:, :, head].unbind(1)
        for _, _, first in chosen.tolist():
            rows = slice(first, first + attention.BLOCK)
            scores = q[rows].float() @ k.float().T * head_dim**-0.5
            scores -= slopes[head] * (at[rows, None] - at).abs()
            expected = scores.softmax(-1) @ v.float()
            assert relative_error(actual[rows, head], expected) < ERROR[torch.float16]


@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_keys_that_do_not_fit_in_shared_memory_are_streamed(
    monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    monkeypatch.setattr(attention, "shared_memory", lambda device: 101_376)
    check_attention(LENGTHS["around the borders"], positions, 128)


@pytest.mark.parametrize(
    ("backend", "positions"),
    [("sdpa", "rotary"), ("sdpa", "alibi")],
)
def test_other_backends_equal_the_reference(backend: AttentionBackend, positions: str) -> None:
    lengths = [5, 168, 168, 300, 64, 1]
    qkv = random(sum(lengths), 3, 4, 64)
    expected = reference(qkv, lengths, positions)
    assert relative_error(attend(qkv, lengths, backend, positions), expected) < 3e-3


@pytest.mark.parametrize("width", [256, 320, 768, 1280, 2560, 5120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_add_norm(width: int, dtype: torch.dtype) -> None:
    check_add_norm(301, width, dtype)


@pytest.mark.parametrize("num_tokens", [3, 128, 1000])
@pytest.mark.parametrize(("depth", "width"), [(256, 1024), (320, 1280), (768, 3072), (1280, 5120), (72, 200)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("without_tma", [True, False])
def test_product_with_activation(
    monkeypatch: pytest.MonkeyPatch, without_tma: bool, gated: bool, depth: int, width: int, num_tokens: int
) -> None:
    if without_tma:
        monkeypatch.setattr(gemm_gelu, "shared_memory", lambda device: 101_376)
    check_product(num_tokens, depth, width, gated=gated)


def test_product_beyond_int32_offsets() -> None:
    """The result has more than 2^31 elements; its last rows equal those of a small product."""
    weight, bias = random(20_480, 16, seed=1), random(20_480, seed=2)
    x = random(106_000, 16)
    for shared_memory in (101_376, 232_448):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gemm_gelu, "shared_memory", lambda device, limit=shared_memory: limit)
            whole = torch.ops.virnuc.linear_gelu(x, weight, bias, False)
            assert torch.equal(whole[-128:], torch.ops.virnuc.linear_gelu(x[-128:], weight, bias, False))


fp8_tensor_cores = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="Ada and later"
)


@fp8_tensor_cores
@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_attention_in_fp8(positions: str) -> None:
    check_attention_in_fp8(LENGTHS["around the borders"], positions, torch.bfloat16)


@fp8_tensor_cores
@pytest.mark.parametrize("num_tokens", [3, 128, 1000])
@pytest.mark.parametrize(
    ("depth", "width"), [(256, 1024), (320, 1280), (768, 3072), (2560, 10240), (48, 208)]
)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("without_tma", [True, False])
def test_fp8_product_with_activation(
    monkeypatch: pytest.MonkeyPatch, without_tma: bool, gated: bool, depth: int, width: int, num_tokens: int
) -> None:
    if without_tma:
        monkeypatch.setattr(gemm_gelu, "shared_memory", lambda device: 101_376)
    check_fp8_product(gated, num_tokens, depth, width)


def test_segment_mean_beyond_int32_offsets() -> None:
    """More sequences than the second grid dimension can hold, and a last one that ends beyond 2^31."""
    width, num_sequences = 768, 70_000
    bounds = torch.arange(num_sequences + 1, dtype=torch.int32, device=DEVICE)
    bounds[-1] = num_tokens = 2_900_000
    hidden = torch.ones(num_tokens, width, dtype=torch.float16, device=DEVICE)
    hidden[-1_000_000:] = 2.0
    with torch.inference_mode():
        means = mean_pool(hidden, bounds, include_special_tokens=True)
    assert bool((means[:-1] == 1).all())
    longest = num_tokens - num_sequences + 1
    torch.testing.assert_close(means[-1], torch.full_like(means[-1], 1 + 1_000_000 / longest))


@pytest.mark.parametrize("specials", [True, False])
def test_segment_mean_is_the_same_alone_and_in_a_batch(specials: bool) -> None:
    lengths = [3, 168, 1022, 64, 5000]
    hidden = random(sum(lengths), 320)
    means = check_segment_mean(hidden, lengths, specials)
    with torch.inference_mode():
        for mean, one in zip(means, hidden.split(lengths), strict=True):
            alone = torch.tensor([0, len(one)], dtype=torch.int32, device=DEVICE)
            assert torch.equal(mean_pool(one, alone, include_special_tokens=specials)[0], mean)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_embeddings_make_up_for_masked_tokens(lengths: list[int]) -> None:
    check_embedding(lengths, 320)
