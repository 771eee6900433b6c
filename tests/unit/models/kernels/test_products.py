"""QuACK's products with their epilogues, and whole models of them, against plain torch; for Hopper GPUs."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.exact_products import activated, added, normed
from virnuc_core.models.kernels import has_quack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if not has_quack(DEVICE):
    pytest.skip("needs QuACK and a Hopper GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

from virnuc_core.models.kernels import products  # noqa: E402

FP8 = torch.float8_e4m3fn
ERROR = {torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2, FP8: 0.04}
each_dtype = pytest.mark.parametrize("dtype", ERROR)
# Tokens, input and output width: those of models, and some that fill no tile.
SHAPES = [(1000, 320, 960), (4096, 768, 768), (257, 1280, 3840), (1, 48, 32), (131, 208, 352)]
each_shape = pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def operands(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, W, and their exact product with a factor for each token, and a bias."""
    x, weight = random(tokens, inputs, seed=0, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype)
    factor = (random(1, tokens, seed=2).abs() + 0.5) * inputs**-0.5
    return x, weight, factor, random(1, outputs, seed=3)


@each_dtype
@each_shape
def test_rows_times_their_factors(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight, factor, bias = operands(tokens, inputs, outputs, dtype)
    actual = products.multiply_normed(x, factor, weight, bias)
    expected_dtype = torch.bfloat16 if dtype == FP8 else dtype
    assert (actual.dtype, actual.shape) == (expected_dtype, (tokens, outputs))
    assert relative_error(actual, normed(x, factor, weight, bias)) < ERROR[expected_dtype]


@each_dtype
@each_shape
@pytest.mark.parametrize("gated", [True, False])
def test_gelu(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, gated: bool) -> None:
    x, weight, factor, bias = operands(tokens, inputs, outputs, dtype)
    actual = products.multiply_normed_gelu(x, factor, weight, bias, gated=gated, out_factor=1.5)
    wanted = activated(normed(x, factor, weight, bias), gated=gated)
    assert (actual.dtype, actual.shape) == (dtype, wanted.shape)
    assert relative_error(actual, 1.5 * wanted) < ERROR[dtype]


def test_gelu_is_the_erf_form() -> None:
    """One column a value: the product with the identity."""
    x = torch.linspace(-8, 8, 4096, device=DEVICE).view(-1, 32)
    identity = torch.eye(32, device=DEVICE, dtype=torch.float16)
    ones, zeros = torch.ones((1, len(x)), device=DEVICE), torch.zeros((1, 32), device=DEVICE)
    actual = products.multiply_normed_gelu(x.half(), ones, identity, zeros, gated=False, out_factor=1.0)
    expected = functional.gelu(x.half().double())
    rounding = expected.abs() * 2**-11
    assert float(((actual.double() - expected).abs() - rounding).max()) < 5e-4


@each_dtype
@each_shape
@pytest.mark.parametrize("post_norm", [True, False])
def test_sums(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, post_norm: bool) -> None:
    x, weight, _, bias = operands(tokens, inputs, outputs, dtype)
    half = torch.bfloat16 if dtype == FP8 else dtype
    residual = random(tokens, outputs, seed=4, dtype=half)
    norm = None
    if post_norm:
        norm = random(1, outputs, seed=5), random(1, tokens, seed=6).abs(), random(1, tokens, seed=7)
    in_fp8 = dtype == FP8
    alpha = inputs**-0.5 if in_fp8 else 1.0
    scale = random(1, tokens, seed=8).abs() + 0.5 if in_fp8 else None
    wanted = added(x, weight, alpha, residual, bias, norm)
    sums, squares, quantized = products.add_product(
        x, weight, alpha, residual, bias, post_norm=norm, scale=scale
    )
    assert relative_error(residual, wanted) < ERROR[half]
    assert sums.shape == squares.shape
    assert relative_error(sums.sum(1), wanted.sum(1)) < 1e-3
    assert relative_error(squares.sum(1), wanted.square().sum(1)) < 1e-3
    assert (quantized is None) == (scale is None)
    if quantized is not None and scale is not None:
        assert quantized.dtype == FP8
        assert relative_error(quantized, wanted * scale.t()) < ERROR[FP8]


@each_dtype
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    x, weight, factor, bias = operands(1000, 320, 960, dtype)
    together = products.multiply_normed(x, factor, weight, bias)
    for begin, end in ((0, 1), (130, 390), (999, 1000)):
        own = factor[:, begin:end].clone()
        assert torch.equal(
            products.multiply_normed(x[begin:end].clone(), own, weight, bias), together[begin:end]
        )
