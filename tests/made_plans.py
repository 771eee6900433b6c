"""A hand-written plan of a predict run with two shards."""

from dataclasses import replace

from tests.made_models import make_spec
from virnuc_core import __version__
from virnuc_core.inference.plan import PlannedHead, PlannedModel, RunPlan, Shard
from virnuc_core.specs import Family, InputFile


def model(family: Family, **changes: object) -> PlannedModel:
    planned = PlannedModel(
        name="tiny",
        family=family,
        spec=make_spec(family, num_layers=4, embedding_dim=8, ffn_dim=32),
        repr_layer=4,
        weights_fingerprint="a" * 64,
        precision="fp32",
        engine="packed",
        attention="sdpa",
        compiled=False,
        token_budget=4096,
        location="/models/tiny",
    )
    return replace(planned, **changes)


PLAN = RunPlan(
    kind="predict",
    inputs=(InputFile(name="in.fa", size=10, sha256="b" * 64),),
    input_digest="c" * 64,
    chunk_length=500,
    frames="open",
    models=(model("dnabert_s"), model("esm2")),
    head=PlannedHead(name="head_500.pth", fingerprint="d" * 64, location="/heads/head_500.pth"),
    embeddings="float32",
    shards=(Shard(index=0, begin=0, end=7, cost=1.5), Shard(index=1, begin=7, end=9, cost=0.5)),
    virnuc_version=__version__,
)
