"""The head for the longest stretches: from the vectors of rows to scores of chunks and of whole contigs.

Shape legend: N rows (at most two a chunk), C chunks, R contigs, K classes, F features of a row, Z code width, W context width,
H pooling heads.

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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.files import atomic_path, from_json, parse_object
from virnuc_core.models.catalogue import HEAD_METADATA
from virnuc_core.models.tensor_files import is_finite, read_tensors
from virnuc_core.specs import CODE_WIDTH

# With few or easy validation records the temperature would tend to 0, and every score to 0 or 1.
TEMPERATURE_BOUNDS: Final = (0.25, 20.0)
MAX_NOVELTY: Final = 2.0
_KERNEL: Final = 7
_DILATIONS: Final = (1, 4)
# Chunks on either side that the hidden state of a chunk depends on.
_REACH: Final = sum(_DILATIONS) * (_KERNEL // 2)
_SEGMENT_CHUNKS: Final = 1 << 12
# Rows of a matrix product on the CPU.
_BLOCK_ROWS: Final = 256
_COMPARED_CONTIGS: Final = 1 << 12  # at a time


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
    code_width: int = CODE_WIDTH
    context_width: int = 128
    pooling_heads: int = 4

    def require_valid(self) -> None:
        """Raises ValueError for sizes and classes that no head has."""
        sizes = (self.dna_width, self.protein_width, self.hidden_width, self.pooling_heads)
        if min(sizes) < 1 or self.context_width < 1 or self.context_width % self.pooling_heads:
            raise ValueError("its sizes are those of no head")
        if self.code_width != CODE_WIDTH:
            raise ValueError(f"its row codes have {self.code_width} numbers, and must have {CODE_WIDTH}")
        if not 0 < self.num_virus < len(self.classes) or len(set(self.classes)) < len(self.classes):
            raise ValueError(
                f"{self.num_virus} of {len(self.classes)} classes are viruses, or two have one name"
            )


@dataclass(frozen=True, slots=True)
class Contigs:
    """Results for C chunks of R contigs.

    Attributes:
        context: (C, K) logits of chunks in the context of their contigs.
        logits: (R, K).
        embedding: (R, Z) of length 1.
        attention: (C,) share of each chunk in its contig's logits; sums to 1 over a contig.
    """

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
            _Linear(spec.dna_width + spec.protein_width + 2, spec.hidden_width),
            nn.GELU(),
            nn.Dropout(dropout),
            _Linear(spec.hidden_width, code),
            nn.LayerNorm(code, elementwise_affine=False),
        )
        self.gate = _Linear(code, 1)
        self.chunk = nn.Sequential(
            _Linear(code, width), nn.GELU(), nn.Dropout(dropout), _Linear(width, len(spec.classes))
        )
        self.enter = _Linear(code, width)
        self.blocks = nn.ModuleList(_Block(width, dilation, dropout) for dilation in _DILATIONS)
        self.context = _Linear(width, len(spec.classes))
        self.attention = _Linear(width, spec.pooling_heads)
        self.values = _Linear(width, width)
        self.contig = nn.Sequential(
            _Linear(width + code + 1, width),
            nn.GELU(),
            nn.Dropout(dropout),
            _Linear(width, len(spec.classes)),
        )
        self.embedding = _Linear(width, code)
        self.chunk_temperature: Tensor
        self.context_temperature: Tensor
        self.contig_temperature: Tensor
        self.centroids: Tensor
        self.novelty_limit: Tensor
        # Temperatures of chunks alone and in context, and of contigs as intercept and slope over the logarithm of the number
        # of chunks.
        self.register_buffer("chunk_temperature", torch.ones(()))
        self.register_buffer("context_temperature", torch.ones(()))
        self.register_buffer("contig_temperature", torch.tensor([1.0, 0.0]))
        # Unit vectors (M, Z) that stand for the embeddings of the training contigs, and the novelty above which a contig is novel.
        self.register_buffer("centroids", torch.empty(0, code))
        self.register_buffer("novelty_limit", torch.tensor(MAX_NOVELTY))

    @property
    def in_features(self) -> int:
        """Width of the DNA vector and the protein vector together."""
        return self.spec.dna_width + self.spec.protein_width

    def virus_margin(self, logits: Tensor) -> Tensor:
        """Log-odds of a virus, fp32 (n,), of logits (n, K), before calibration."""
        logits = logits.float()
        virus, other = logits.tensor_split([self.spec.num_virus], dim=1)
        return virus.logsumexp(1) - other.logsumexp(1)

    def chunk_margin(self, logits: Tensor) -> Tensor:
        """Calibrated log-odds of a virus, fp32 (n,), of logits of rows or chunks (n, K)."""
        return self.virus_margin(logits) / self.chunk_temperature

    def context_margin(self, logits: Tensor) -> Tensor:
        """Calibrated log-odds of a virus, fp32 (C,), of logits of chunks in the context of their contigs (C, K)."""
        return self.virus_margin(logits) / self.context_temperature

    def contig_margin(self, logits: Tensor, num_chunks: Tensor) -> Tensor:
        """Calibrated log-odds of a virus, fp32 (R,), of logits of contigs (R, K) with so many scored chunks (R,)."""
        intercept, slope = self.contig_temperature
        temperature = intercept + slope * num_chunks.clamp(min=1).float().log()
        margin: Tensor = self.virus_margin(logits) / temperature.clamp(*TEMPERATURE_BOUNDS)
        return margin

    @torch.inference_mode()
    def score_rows(self, features: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and codes of rows, each from itself alone; the module must be in evaluation mode.

        Args:
            features: fp32 (N, F), the DNA vector before the protein vector.
            sizes: (N, 2), see `row_codes`.

        Returns:
            P(other) and P(virus), fp32 (N, 2), and codes, fp16 (N, Z). The scores are those of the rounded codes, so that a
            chunk of one row has the score of its row.

        Raises:
            MismatchError: the features are of another width.
        """
        if features.shape[1] != self.in_features:
            raise MismatchError(
                f"the classifier head takes {self.in_features} features and the models give {features.shape[1]} (DNA and "
                "protein together). Choose the head that was trained on these models."
            )
        dna, protein = features.tensor_split([self.spec.dna_width], dim=1)
        codes = self.row_codes(dna, protein, sizes).half()
        margin = self.chunk_margin(self.chunk(codes.float()))
        return torch.stack((-margin, margin), dim=1).sigmoid(), codes

    def row_codes(self, dna: Tensor, protein: Tensor, sizes: Tensor) -> Tensor:
        """Codes (N, Z) of vectors (N, D_dna) and (N, D_protein); `sizes` (N, 2) are residues of the row and bases of its chunk."""
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
        """Reads the chunk codes (C, Z), C > 0, of each contig in their order; `contig` int64 (C,) is ascending.

        A contig without chunks gets logits without a meaning. Long contigs are read in segments, so that apart from its
        arguments and results this takes memory for `_SEGMENT_CHUNKS` chunks only.
        """
        heads = self.spec.pooling_heads
        context, weights = [], []
        pooled = torch.zeros(num_contigs, heads, self.spec.context_width // heads, device=codes.device)
        for begin in range(0, len(codes), _SEGMENT_CHUNKS):
            end = min(begin + _SEGMENT_CHUNKS, len(codes))
            hidden = self._hidden(codes, contig, begin, end)
            weight = self.attention(hidden).float().clamp(-20, 20).exp()
            values = self.values(hidden).float().unflatten(1, (heads, -1)) * weight.unsqueeze(2)
            pooled.index_add_(0, contig[begin:end], values)
            context.append(self.context(hidden))
            weights.append(weight)
        weight = torch.cat(weights)
        total = weight.new_zeros(num_contigs, heads).index_add_(0, contig, weight).clamp(min=1e-9)
        pooled = (pooled / total.unsqueeze(2)).flatten(1)
        # torch.bincount would wait for the device.
        counts = contig.new_zeros(num_contigs).index_add_(0, contig, torch.ones_like(contig))
        counts = counts.clamp(min=1).unsqueeze(1)
        mean = codes.new_zeros(num_contigs, codes.shape[1]).index_add_(0, contig, codes) / counts
        return Contigs(
            context=torch.cat(context),
            logits=self.contig(torch.cat((pooled, mean, counts.log()), dim=1)),
            embedding=functional.normalize(self.embedding(pooled).float(), dim=1),
            attention=(weight / total[contig]).mean(1),
        )

    def novelty(self, embedding: Tensor) -> Tensor:
        """1 - cosine to the nearest centroid, fp32 (R,), 0..2, of embeddings (R, Z) of length 1; NaN without centroids."""
        if not len(self.centroids):
            return torch.full((len(embedding),), torch.nan)
        # In double precision, so that fp32 does not depend on how many are multiplied at a time.
        centroids = self.centroids.double().T
        nearest = [(part.double() @ centroids).amax(1) for part in embedding.split(_COMPARED_CONTIGS)]
        return (1 - torch.cat(nearest)).clamp(0, MAX_NOVELTY).float()

    def _hidden(self, codes: Tensor, contig: Tensor, begin: int, end: int) -> Tensor:
        """Hidden states (n, W) of the chunks begin..end-1, from these and all chunks that they depend on."""
        first, last = max(0, begin - _REACH), min(end + _REACH, len(codes))
        hidden: Tensor = self.enter(codes[first:last])
        for block in self.blocks:
            hidden = block(hidden, contig[first:last])
        return hidden[begin - first : end - first]


class _Linear(nn.Linear):
    """Multiplies in blocks of fixed shape on the CPU: rounding depends on the shape, and no contig should on others in the file."""

    def forward(self, rows: Tensor) -> Tensor:
        """(n, I) -> (n, O)."""
        if self.training or rows.device.type != "cpu":
            return super().forward(rows)
        *blocks, last = rows.split(_BLOCK_ROWS)
        blocks.append(functional.pad(last, (0, 0, 0, _BLOCK_ROWS - len(last))))
        return torch.cat([super(_Linear, self).forward(block) for block in blocks])[: len(rows)]


class _Block(nn.Module):
    """A dilated depthwise convolution along the contig, then a feed-forward layer, each with its residual."""

    def __init__(self, width: int, dilation: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # Its weights are applied below, so that chunks of other contigs count as zeros.
        self.mix = nn.Conv1d(width, width, _KERNEL, dilation=dilation, groups=width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width),
            _Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            _Linear(2 * width, width),
        )

    def forward(self, hidden: Tensor, contig: Tensor) -> Tensor:
        """(C, W) -> (C, W) for chunks of ascending contigs (C,)."""
        assert self.mix.bias is not None
        [dilation] = self.mix.dilation
        reach = dilation * (_KERNEL // 2)
        normed = functional.pad(self.norm(hidden), (0, 0, reach, reach))
        neighbour = functional.pad(contig, (reach, reach), value=-1)
        hidden = hidden + self.mix.bias
        for tap, weight in enumerate(self.mix.weight[:, 0].unbind(1)):
            place = slice(tap * dilation, tap * dilation + len(contig))
            is_own = (neighbour[place] == contig).to(normed.dtype).unsqueeze(1)
            hidden.addcmul_(normed[place] * is_own, weight)
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
        spec = from_json(HeadSpec, stated.get("spec"))
        spec.require_valid()
        for name, tensor in state.items():
            if tensor.dtype != torch.float32 or not is_finite(tensor):
                raise ValueError(f"{name} holds other numbers than finite ones in fp32")
        # Without memory for what a damaged specification asks for: the tensors of the file take their places.
        with torch.device("meta"):
            head = ContigHead(spec)
            # Heads may have any number of centroids, or none.
            head.centroids = torch.empty(state.get("centroids", head.centroids).shape)
        neutral = {"centroids": torch.empty(0, spec.code_width), "novelty_limit": torch.tensor(MAX_NOVELTY)}
        head.load_state_dict({**neutral, **state}, assign=True)
        if head.centroids.ndim != 2 or head.centroids.shape[1] != spec.code_width:
            raise ValueError(f"its centroids are of shape {tuple(head.centroids.shape)}")
        if min(head.chunk_temperature, head.context_temperature) <= 0:
            raise ValueError("its temperature is not above zero")
    except (LookupError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a head for the longest stop-free stretches: {error}. Give one of virnuc train, or make it again."
        ) from error
    return head.requires_grad_(False).eval()


def save_contig_head(head: ContigHead, path: Path, facts: Mapping[str, Any]) -> None:
    """Writes a head as fp32 safetensors, atomically and reproducibly; `facts` go into the metadata as JSON."""
    state = {name: tensor.detach().cpu().float().contiguous() for name, tensor in head.state_dict().items()}
    # One entry: safetensors writes several in an order that changes from process to process.
    stated = {**facts, "frames": "longest", "spec": asdict(head.spec)}
    with atomic_path(path) as temporary:
        save_file(state, temporary, metadata={HEAD_METADATA: json.dumps(stated, sort_keys=True)})
