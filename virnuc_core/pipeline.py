"""The stages of a run, once, in order: the Python API, the flows and the command line run these."""

from typing import Any

from virnuc_core.errors import UsageError
from virnuc_core.models.catalogue import AUTO_HEAD
from virnuc_core.run_plan import RunPlan
from virnuc_core.settings import ReprocessSettings, RunConfig


def reprocess_config(plan: RunPlan, settings: ReprocessSettings) -> RunConfig:
    """The run that a planned run with both models is moved to: what is not given is as it was.

    What depends on something that is given is resolved anew: layer and head with a model, precision and attention with
    an engine, attention with a precision.

    Raises:
        UsageError: the run has no two models and head, or no rows for the DNA head that is given.
    """
    esm2, dnabert, given = plan.model("esm2"), plan.model("dnabert_s"), settings.given
    if esm2 is None or dnabert is None or plan.head is None:
        raise UsageError("only a run with an ESM-2 model, a DNABERT-S model and a head can be reprocessed.")
    if "dna_head" in given and plan.dna_head is None:
        raise UsageError(
            "this run has no rows for chunks without an open frame: make a new one with --dna-head."
        )
    same_engine = not {"engine", "dnabert_engine"} & set(given)
    kept: dict[str, Any] = {
        "chunk_length": plan.chunk_length,
        "min_length": plan.min_length,
        "threshold": plan.threshold,
        "embeddings": plan.embeddings,
        "esm_model": esm2.location,
        "dnabert_model": dnabert.location,
        "engine": esm2.engine,
    }
    if not {"esm_model", "dnabert_model"} & set(given):
        kept["head"] = plan.head.location
    if plan.dna_head is not None:
        kept["dna_head"] = AUTO_HEAD if "dnabert_model" in given else plan.dna_head.location
    if "esm_model" not in given:
        kept["repr_layer"] = esm2.repr_layer
    if "engine" not in given:
        kept["dnabert_engine"] = dnabert.engine
    if same_engine:
        kept["precision"] = esm2.precision
        if "precision" not in given:
            kept["dnabert_precision"] = dnabert.precision
    packed = {model.attention for model in (esm2, dnabert) if model.engine == "packed"}
    if same_engine and not {"precision", "dnabert_precision"} & set(given) and len(packed) == 1:
        [attention] = packed
        kept["attention"] = attention if attention != "padded" else "auto"
    return RunConfig(**{**kept, **given})
