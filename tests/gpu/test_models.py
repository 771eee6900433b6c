"""Both models on a GPU: every precision and backend against the fp32 reference, and compiled layers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from tests.made_models import write_model
from virnuc_core.models.attention import TritonAttention, resolve_attention
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.models.kernels import has_quack
from virnuc_core.models.memory import upload
from virnuc_core.specs import AttentionBackend, Family, ProductBackend, ResolvedPrecision
from virnuc_core.versions import FLASH_ATTN, FLASH_ATTN_VERSION, installed_version

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
QUACK = has_quack(torch.device(DEVICE))
MODELS: dict[Family, str] = {"esm2": "random:8M", "dnabert_s": "random:DNABERT-S"}
LEAST_COSINE: dict[ResolvedPrecision, float] = {"fp16": 0.9995, "bf16": 0.9995, "fp8": 0.995}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def load(family: Family, precision: ResolvedPrecision, products: ProductBackend | None = None) -> Encoder:
    return load_model(open_checkpoint(MODELS[family], family), DEVICE, precision, products=products)


def embed(
    model: Encoder, backend: AttentionBackend, lengths: np.ndarray, repr_layer: int | None = None
) -> torch.Tensor:
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 24, int(lengths.sum())).astype(np.int32))
    layout = model.build_layout(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), backend)
    with torch.inference_mode():
        return model.embed(ids.to(DEVICE), layout, repr_layer)


def least_cosine(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(actual.double(), expected.double()).min())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_of_any_size_and_layout_are_uploaded(dtype: torch.dtype) -> None:
    numbers = torch.arange(9_000_000).to(dtype)
    for tensor in (numbers, numbers[:0], numbers[7:9], numbers.view(3000, 3000).t(), numbers[::2]):
        uploaded = upload(tensor, DEVICE)
        assert uploaded.is_contiguous()
        assert uploaded.dtype == dtype
        assert torch.equal(uploaded.cpu(), tensor)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
@pytest.mark.parametrize("products", ["torch", None])
def test_weights_are_those_of_the_file_and_need_little_more_memory(
    products: ProductBackend | None, file_format: str, precision: ResolvedPrecision, tmp_path: Path
) -> None:
    [entry] = find_entries("35M", "esm2")
    folder = write_model(tmp_path / "model", entry.spec)
    if file_format == "torch":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(folder), "esm2")
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    model = load_model(checkpoint, DEVICE, precision, products=products)
    beside = torch.cuda.max_memory_allocated(DEVICE) - torch.cuda.memory_allocated(DEVICE)
    weights = model.state_dict()
    assert sum(tensor.nbytes for tensor in weights.values()) <= torch.cuda.memory_allocated(DEVICE) - before
    assert beside <= 3 * max(tensor.numel() * 4 for tensor in weights.values())
    if model.is_fused:  # weights have taken up LayerNorms
        return
    for name, parts in checkpoint.published_parts().items():
        tensor = checkpoint.assemble(name, parts)
        assert torch.equal(weights[name].cpu(), tensor.to(weights[name].dtype)), name


LENGTHS = np.random.default_rng(1).integers(30, 400, 200)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("precision", LEAST_COSINE)
@pytest.mark.parametrize("backend", ["triton", "sdpa", "flash-attn"])
@pytest.mark.filterwarnings("ignore")  # of the compiler that flash-attn brings
def test_every_precision_and_backend_is_close_to_fp32(
    family: Family, precision: ResolvedPrecision, backend: AttentionBackend
) -> None:
    if backend == "flash-attn" and installed_version(FLASH_ATTN) != FLASH_ATTN_VERSION:
        pytest.skip(f"needs {FLASH_ATTN} {FLASH_ATTN_VERSION}")
    if precision == "fp8" and backend != "triton":
        pytest.skip("supports fp16 and bf16")
    if precision == "fp8" and not QUACK:
        pytest.skip("needs QuACK and a Hopper GPU")
    exact, model = load(family, "fp32"), load(family, precision)
    for repr_layer in (None, 0, 1):
        expected = embed(exact, "sdpa", LENGTHS, repr_layer)
        actual = embed(model, backend, LENGTHS, repr_layer)
        assert actual.dtype == torch.float32
        least = LEAST_COSINE[precision] if repr_layer is None else 0.995
        assert least_cosine(actual, expected) >= least
    assert model.is_fused == QUACK


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_products_of_torch_are_close_to_fp32(family: Family, precision: ResolvedPrecision) -> None:
    """Where QuACK is not installed, and on other GPUs."""
    exact, model = load(family, "fp32"), load(family, precision, "torch")
    assert not model.is_fused
    assert (
        least_cosine(embed(model, "triton", LENGTHS), embed(exact, "sdpa", LENGTHS))
        >= LEAST_COSINE[precision]
    )


@pytest.mark.parametrize("family", MODELS)
def test_auto_is_our_kernel_and_it_runs(family: Family) -> None:
    model = load(family, "fp16")
    backend = resolve_attention("auto", DEVICE, family, "fp16", model.spec.head_dim)
    assert backend == "triton"
    layout = model.build_layout(np.array([0, 20, 400], np.int32), backend)
    assert isinstance(layout.attention, TritonAttention)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        embed(model, backend, LENGTHS)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "_whole_kernel" in names
    assert "_tile_kernel" in names
    assert ("_norm_factors_kernel" in names) == QUACK
    assert resolve_attention("auto", DEVICE, family, "fp32", model.spec.head_dim) == "sdpa"


@pytest.mark.parametrize("family", MODELS)
def test_layers_are_not_compiled_again_for_every_batch(family: Family) -> None:
    plain = load(family, "fp16")
    checkpoint = open_checkpoint(MODELS[family], family)
    model = load_model(checkpoint, DEVICE, "fp16", compiled=True)
    random = np.random.default_rng(0)
    batches = [random.integers(3, 600, int(random.integers(1, 40))) for _ in range(200)]
    for lengths in (np.array([7]), np.array([400]), *batches[:50]):
        embed(model, "triton", lengths)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled >= 1
    for lengths in batches[50:]:
        embed(model, "triton", lengths)
    assert counters["stats"]["unique_graphs"] == compiled
    torch.testing.assert_close(
        embed(model, "triton", LENGTHS), embed(plain, "triton", LENGTHS), rtol=2e-2, atol=5e-3
    )
