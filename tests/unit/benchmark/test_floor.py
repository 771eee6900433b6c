import pytest
import torch

from virnuc_core.benchmark.clock import rounds_per_second
from virnuc_core.benchmark.floor import GemmFloor, gemm_shapes
from virnuc_core.models.checkpoint import build_model
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import Family


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_shapes_are_those_of_a_layer(family: Family) -> None:
    spec = open_checkpoint("random:tiny", family).spec
    layer = build_model(spec).layers[0]
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    assert sorted((module.in_features, module.out_features) for module in linears) == sorted(
        gemm_shapes(spec)
    )


def test_the_floor_runs_as_many_layers_as_the_model_has() -> None:
    spec = open_checkpoint("random:tiny", "esm2").spec
    floor = GemmFloor(spec, "fp32", 16, "cpu")
    with torch.profiler.profile() as profile:
        floor.launch()
    products = [event for event in profile.events() if "linear" in event.name]
    assert len(products) == len(gemm_shapes(spec)) * spec.num_layers


def test_whole_rounds_are_counted() -> None:
    done: list[int] = []
    rate = rounds_per_second([lambda: done.append(1), lambda: done.append(2)], 0.01, "cpu")
    assert done == [1, 2] * (len(done) // 2)
    assert 0 < rate <= len(done) / 2 / 0.01
