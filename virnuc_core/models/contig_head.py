"""The head for the longest stretches: from the vectors of rows to scores of chunks and of whole contigs.

Shape legend: N rows (at most two a chunk), C chunks, R contigs, K classes, F features of a row, Z code width, W context width.

    features (N, F) -> row codes (N, Z) -> chunk codes (C, Z) -> context (C, W) -> contigs (R, W)
                            |                  |                    |                 |
                       row logits         chunk logits        logits in context   contig logits (R, K), embedding (R, Z)
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.files import atomic_path, from_json, parse_object
from virnuc_core.models.catalogue import HEAD_METADATA
from virnuc_core.models.tensor_files import is_finite, read_tensors

_KERNEL: Final = 7
_DILATIONS: Final = (1, 4)
# Chunks between two contigs, so that no convolution reaches from one into the other.
_GAP: Final = max(_DILATIONS) * (_KERNEL // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """What a head takes and tells, and its sizes.

    Attributes:
        dna_width: of the DNA vectors that it takes.
        protein_width: of the protein vectors.
        classes: names; those of viruses come first.
        num_virus: how many classes are of viruses.
    """

    dna_width: int
    protein_width: int
    classes: tuple[str, ...]
    num_virus: int
    hidden_width: int = 256
    code_width: int = 64
    context_width: int = 128
    pooling_heads: int = 4


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows of C chunks of R contigs, all in order.

    Attributes:
        chunk: int64 (N,) chunk of each row.
        contig: int64 (C,) contig of each chunk; every chunk has a row.
        sizes: fp32 (N, 2) number of residues of the row and of bases of its chunk.
    """

    chunk: Tensor
    contig: Tensor
    sizes: Tensor


@dataclass(frozen=True, slots=True)
class Contigs:
    """Logits of C chunks in the context of their contigs (C, K), and of R contigs (R, K); unit embeddings (R, Z)."""

    context: Tensor
    logits: Tensor
    embedding: Tensor
    attention: Tensor


class ContigHead(nn.Module):
    """Scores rows, chunks and contigs; see the module's diagram."""

    def __init__(self, spec: HeadSpec, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec = spec
        code, width = spec.code_width, spec.context_width
        self.dna_norm = nn.LayerNorm(spec.dna_width)
        self.protein_norm = nn.LayerNorm(spec.protein_width)
        self.row = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(spec.dna_width + spec.protein_width + 2, spec.hidden_width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(spec.hidden_width, code),
            nn.LayerNorm(code, elementwise_affine=False),
        )
        self.gate = nn.Linear(code, 1)
        self.chunk = nn.Sequential(
            nn.Linear(code, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, len(spec.classes))
        )
        self.enter = nn.Linear(code, width)
        self.blocks = nn.ModuleList(_Block(width, dilation, dropout) for dilation in _DILATIONS)
        self.context = nn.Linear(width, len(spec.classes))
        self.attention = nn.Linear(width, spec.pooling_heads)
        self.values = nn.Linear(width, width)
        self.contig = nn.Sequential(
            nn.Linear(width + code + 1, width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(width, len(spec.classes)),
        )
        self.embedding = nn.Linear(width, code)
        self.chunk_temperature: Tensor
        self.contig_temperature: Tensor
        # Temperatures of chunks, and of contigs as intercept and slope over the logarithm of the number of chunks.
        self.register_buffer("chunk_temperature", torch.ones(()))
        self.register_buffer("contig_temperature", torch.tensor([1.0, 0.0]))

    def virus_margin(self, logits: Tensor) -> Tensor:
        """Log-odds of a virus, fp32 (n,), of logits (n, K)."""
        logits = logits.float()
        virus, other = logits.tensor_split([self.spec.num_virus], dim=1)
        return virus.logsumexp(1) - other.logsumexp(1)

    def row_codes(self, dna: Tensor, protein: Tensor, sizes: Tensor) -> Tensor:
        """Codes (N, Z) of vectors (N, D_dna) and (N, D_protein) with `sizes` as in `Rows`.

        Raises:
            MismatchError: the vectors are of another width than the head's.
        """
        found, wanted = (dna.shape[1], protein.shape[1]), (self.spec.dna_width, self.spec.protein_width)
        if found != wanted:
            raise MismatchError(
                f"the classifier head takes DNA and protein vectors of {wanted[0]} and {wanted[1]} numbers, and the models give "
                f"{found[0]} and {found[1]}. Choose the head that was trained on these models."
            )
        residues, bases = sizes.float().unbind(1)
        scaled = torch.stack((residues.log2() - 6, 3 * residues / bases), dim=1)
        codes: Tensor = self.row(torch.cat((self.dna_norm(dna), self.protein_norm(protein), scaled), dim=1))
        return codes

    def chunk_codes(self, codes: Tensor, chunk: Tensor, num_chunks: int) -> Tensor:
        """Weighted means (C, Z) of the codes (N, Z) of each chunk's rows."""
        weight = self.gate(codes).float().clamp(-20, 20).exp()
        total = weight.new_zeros(num_chunks, 1).index_add_(0, chunk, weight)
        summed = weight.new_zeros(num_chunks, codes.shape[1]).index_add_(0, chunk, weight * codes.float())
        means: Tensor = summed / total.clamp(min=1e-9)
        return means

    def contigs(self, codes: Tensor, contig: Tensor, num_contigs: int) -> Contigs:
        """Reads the chunk codes (C, Z) of each contig in their order; `contig` (C,) is ascending."""
        place = torch.arange(len(contig), device=contig.device) + _GAP * (contig + 1)
        is_chunk = torch.zeros(len(contig) + _GAP * (num_contigs + 1), device=codes.device, dtype=codes.dtype)
        is_chunk[place] = 1.0
        entered = self.enter(codes)
        hidden = entered.new_zeros(len(is_chunk), self.spec.context_width).index_copy_(0, place, entered)
        for block in self.blocks:
            hidden = block(hidden, is_chunk)
        hidden = hidden[place]
        pooled, attention = self._pool(hidden, contig, num_contigs)
        counts = torch.bincount(contig, minlength=num_contigs).to(codes.dtype)
        mean = codes.new_zeros(num_contigs, codes.shape[1]).index_add_(0, contig, codes)
        mean = mean / counts.clamp(min=1).unsqueeze(1)
        features = torch.cat(
            (pooled, mean.to(pooled.dtype), counts.clamp(min=1).log().unsqueeze(1).to(pooled.dtype)), dim=1
        )
        return Contigs(
            context=self.context(hidden),
            logits=self.contig(features),
            embedding=functional.normalize(self.embedding(pooled).float(), dim=1),
            attention=attention,
        )

    def _pool(self, hidden: Tensor, contig: Tensor, num_contigs: int) -> tuple[Tensor, Tensor]:
        """Attention-weighted means (R, W) of the values of each contig's chunks, and the weights' mean over heads (C,)."""
        weight = self.attention(hidden).float().clamp(-20, 20).exp()
        total = weight.new_zeros(num_contigs, weight.shape[1]).index_add_(0, contig, weight)
        share = weight / total[contig]
        values = self.values(hidden).float().unflatten(1, (weight.shape[1], -1)) * share.unsqueeze(2)
        pooled = values.new_zeros(num_contigs, *values.shape[1:]).index_add_(0, contig, values)
        return pooled.flatten(1).to(hidden.dtype), share.mean(1)


class _Block(nn.Module):
    """A dilated depthwise convolution along the contig, then a feed-forward layer, each with its residual."""

    def __init__(self, width: int, dilation: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        padding = dilation * (_KERNEL // 2)
        self.mix = nn.Conv1d(width, width, _KERNEL, padding=padding, dilation=dilation, groups=width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
        )

    def forward(self, hidden: Tensor, is_chunk: Tensor) -> Tensor:
        """(P, W) -> (P, W) for P places, which `is_chunk` (P,) marks with 1, and the gaps with 0."""
        normed = self.norm(hidden) * is_chunk.unsqueeze(1)
        hidden = hidden + self.mix(normed.T.unsqueeze(0))[0].T
        fed: Tensor = hidden + self.feed(hidden)
        return fed


def load_contig_head(path: Path) -> ContigHead:
    """Reads a head in evaluation mode.

    Raises:
        CheckpointError: the file is damaged, or is no such head.
    """
    try:
        state, _ = read_tensors(path)
        with safe_open(path, framework="pt") as file:
            stated = parse_object((file.metadata() or {})[HEAD_METADATA])
        spec = from_json(HeadSpec, stated["spec"])
        head = ContigHead(spec)
        head.load_state_dict(state)
        if damaged := [name for name, tensor in state.items() if not is_finite(tensor)]:
            raise ValueError(f"{damaged[0]} holds numbers that are not finite")
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a head for the longest stretches: {error}. Give one that virnuc train has made."
        ) from error
    return head.requires_grad_(False).eval()


def save_contig_head(head: ContigHead, path: Path, facts: Mapping[str, Any]) -> None:
    """Writes a head as fp32 safetensors, atomically and reproducibly; `facts` go into the metadata as JSON."""
    state = {name: tensor.detach().cpu().float().contiguous() for name, tensor in head.state_dict().items()}
    stated = {**facts, "frames": "longest", "spec": asdict(head.spec)}
    with atomic_path(path) as temporary:
        save_file(state, temporary, metadata={HEAD_METADATA: json.dumps(stated, sort_keys=True)})
