"""Heads: from the vectors of rows to scores of rows, chunks and contigs.

`MLPClassifier` is VirNucPro's, for the open frames of a chunk; `ContigHead` is for its longest ORFs.
Nothing else asks which of the two a run has: it uses `Head`, and `virnuc_core.specs.FRAME_KINDS` for what follows from the frames.

Shape legend: N rows, C chunks, S chunks with a row, R contigs, K classes, F features of a row, Z code width, W context width,
H pooling heads. Of a ContigHead:

    features (N, F) -> row codes (N, Z) -> chunk codes (C, Z) -> context (C, W) -> contigs (R, W)
                            |                  |                    |                 |
                       row logits         chunk logits        logits in context   contig logits (R, K), embedding (R, Z)
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.columns import Float64
from virnuc_core.errors import CheckpointError
from virnuc_core.files import atomic_path, from_json
from virnuc_core.models.catalogue import HEAD_METADATA, read_facts, read_purpose
from virnuc_core.models.scores import ConfidenceRule, ContigScores, ScoredRows, mean_scores
from virnuc_core.models.tensor_files import is_finite, read_pickle, read_tensors, state_dict_of
from virnuc_core.specs import CODE_WIDTH, FrameRule, Size

# With few or easy validation records the temperature would tend to 0, and every score to 0 or 1.
TEMPERATURE_BOUNDS: Final = (0.25, 20.0)
MAX_NOVELTY: Final = 2.0
_KERNEL: Final = 7
_DILATIONS: Final = (1, 4)


class Head(nn.Module, ABC):
    """What a run uses of a head.

    Attributes:
        frames: what it scores of a chunk.
        widths: F; or, of a head that knows them apart, those of the DNA vectors and the protein vectors.
        classes: names, those of viruses first; empty if it tells no classes.
        facts: what its file states of it, besides how it was made.
        confidence_rules: of the calls of contigs, the most confident first; all others are unsure.
    """

    frames: ClassVar[FrameRule]
    confidence_rules: ClassVar[tuple[ConfidenceRule, ...]]
    _kind: ClassVar[str]
    widths: tuple[int, ...]
    classes: tuple[str, ...]
    facts: Mapping[str, Any]

    @classmethod
    @abstractmethod
    def _read(cls, path: Path) -> Self:
        """Reads a head for `load_head`, which reports the errors."""

    @property
    def takes(self) -> str:
        """`widths` in words."""
        if len(self.widths) == 1:
            return f"{self.widths[0]} features"
        return "DNA and protein embeddings of width {} and {}".format(*self.widths)

    def fits(self, widths: tuple[int, ...]) -> bool:
        """Whether it takes vectors of these widths, of DNA and protein or of both in one."""
        is_joined = 1 in (len(self.widths), len(widths))
        return self.widths == widths or (is_joined and sum(self.widths) == sum(widths))

    @abstractmethod
    def score_rows(self, features: Tensor, sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Results of rows by dataset, each row from itself alone; the module must be in evaluation mode.

        `features` are fp32 (N, F), the DNA vector before the protein vector; `sizes` (N, 2), which a ContigHead requires, are
        the residues of each row and the bases of its chunk. The results are `scores` fp32 (N, 2), P(other) and P(virus); of a
        ContigHead also `codes` fp16 (N, Z), whose scores these are, so that a chunk of one row has the score of its row.
        """

    @abstractmethod
    def score_contigs(self, rows: ScoredRows) -> ContigScores:
        """Scores C chunks and R contigs from the results of their rows; raises CheckpointError if a score is not finite."""


class MLPClassifier(Head):
    """Linear, BatchNorm, ReLU, Dropout, Linear over features of the DNA vector followed by the protein vector.

    Source: the original VirNucPro's MLPClassifier, whose attribute names these are.
    """

    frames = "open"
    _kind = "an MLPClassifier head of VirNucPro or virnuc (hidden_layer, bn1, output_layer with 2 outputs)"
    confidence_rules = (ConfidenceRule("confident", 5, 0.8, 0.8), ConfidenceRule("likely", 2, 0.65, 0.65))

    def __init__(self, in_features: int, hidden_width: int = 512) -> None:
        super().__init__()
        self.widths, self.classes, self.facts = (in_features,), (), {}
        self.hidden_layer = nn.Linear(in_features, hidden_width)
        self.bn1 = nn.BatchNorm1d(hidden_width)
        self.output_layer = nn.Linear(hidden_width, 2)
        self.dropout = nn.Dropout(0.5)

    @classmethod
    def _read(cls, path: Path) -> Self:
        """A pickled whole `__main__.MLPClassifier`, a state dict, or safetensors."""
        state = _read_state(path)
        hidden_width, in_features = state["hidden_layer.weight"].shape
        for name, weights in state.items():
            if not weights.numel() or weights.is_complex() or not is_finite(weights):
                raise ValueError(f"{name} is empty, complex or contains non-finite values")
        if (state["bn1.running_var"] < 0).any():
            raise ValueError("bn1.running_var contains negative values")
        classifier = cls(in_features, hidden_width)
        state.setdefault("bn1.num_batches_tracked", torch.tensor(0))
        classifier.load_state_dict(state)
        return classifier

    def forward(self, features: Tensor) -> Tensor:
        """Logits (n, 2) of features (n, D)."""
        hidden = functional.relu(self.bn1(self.hidden_layer(features)))
        logits: Tensor = self.output_layer(self.dropout(hidden))
        return logits

    @torch.inference_mode()
    def score_rows(self, features: Tensor, sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Softmax of the logits; sizes have no meaning."""
        return {"scores": functional.softmax(self(features), dim=1)}

    def score_contigs(self, rows: ScoredRows) -> ContigScores:
        """Scores chunks from the highest scores of their rows, and contigs as the mean of their chunks.

        Let M1 and M2 be the highest P(other) and P(virus) over the rows of a chunk. Its score lies midway, in log-odds, between the
        row with the strongest evidence for a virus and the one with the strongest evidence against: for a single row it is the
        row's score, and it is at least 0.5 exactly when M2 >= M1.

        Source: `determine_virus` in VirNucPro's prediction.py, for the call at 0.5.
        """
        p_chunk, first = np.full(len(rows.contig), np.nan), rows.first_rows
        if len(first):
            scores = rows.read("scores", 0, len(rows.chunk))
            other, virus = np.maximum.reduceat(scores, first).astype(np.float64).T
            with np.errstate(divide="ignore", invalid="ignore"):
                odds_against = ((1 - virus) * other) / (virus * (1 - other))
            # Opposite scores of exactly 0 and 1 give 0 / 0.
            odds_against[virus == other] = 1.0
            p_chunk[rows.chunk[first]] = 1 / (1 + np.sqrt(odds_against))
        return ContigScores(
            p_chunk=p_chunk,
            p_region=p_chunk,
            p_contig=mean_scores(p_chunk, rows.contig, rows.num_contigs),
            is_novel=np.zeros(rows.num_contigs, np.bool_),
        )


class _PickledModule:
    """Stands in for every module class of a pickled head: keeps the attributes and does nothing."""


def _read_state(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_tensors(path)
    layers = ("linear.Linear", "batchnorm.BatchNorm1d", "activation.ReLU", "dropout.Dropout")
    names = ("__main__.MLPClassifier", *(f"torch.nn.modules.{layer}" for layer in layers))
    content = read_pickle(path, [(_PickledModule, name) for name in names])
    if isinstance(content, _PickledModule):
        content = {
            f"{name}.{own}": tensor
            for name, layer in vars(content)["_modules"].items()
            for own, tensor in {**vars(layer)["_parameters"], **vars(layer)["_buffers"]}.items()
            if tensor is not None
        }
    return state_dict_of(path, content)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """What a ContigHead takes and tells, and its sizes; the first `num_virus` of its classes are of viruses."""

    dna_width: Size
    protein_width: Size
    classes: tuple[str, ...]
    num_virus: Size
    hidden_width: Size = 256
    code_width: Literal[64] = CODE_WIDTH
    context_width: Size = 128
    pooling_heads: Size = 4

    def __post_init__(self) -> None:
        if self.context_width % self.pooling_heads:
            raise ValueError(f"width {self.context_width} is not a multiple of {self.pooling_heads} heads")
        if self.num_virus >= len(self.classes) or len(set(self.classes)) < len(self.classes):
            raise ValueError(
                f"{self.num_virus} of {len(self.classes)} classes are viruses, or two have the same name"
            )


class Contigs(NamedTuple):
    """Logits (C, K) of chunks in the context of their contigs; logits (R, K) and embeddings (R, Z) of length 1 of R contigs."""

    context: Tensor
    logits: Tensor
    embedding: Tensor


class ContigHead(Head):
    """Scores rows, chunks and contigs; see the module's diagram."""

    frames = "longest"
    _kind = "a head of virnuc train for the longest ORFs"
    confidence_rules = (ConfidenceRule("confident", 2, 0.9), ConfidenceRule("likely", 1, 0.75))

    def __init__(self, spec: HeadSpec, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec, self.classes = spec, spec.classes
        self.widths = (spec.dna_width, spec.protein_width)
        self.facts = {"frames": self.frames, "spec": asdict(spec)}
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
        # Temperatures of chunks alone and in context, and of contigs as intercept and slope over the logarithm of the number
        # of chunks.
        self.chunk_temperature = nn.Buffer(torch.ones(()))
        self.context_temperature = nn.Buffer(torch.ones(()))
        self.contig_temperature = nn.Buffer(torch.tensor([1.0, 0.0]))
        # Unit vectors (M, Z) that stand for the embeddings of the training contigs, and the novelty above which a contig is novel.
        self.centroids: Tensor = nn.Buffer(torch.empty(0, code))
        self.novelty_limit = nn.Buffer(torch.tensor(MAX_NOVELTY))

    @classmethod
    def _read(cls, path: Path) -> Self:
        spec = from_json(HeadSpec, read_facts(path).get("spec"))
        state = read_tensors(path)
        for name, tensor in state.items():
            if tensor.dtype != torch.float32 or not is_finite(tensor):
                raise ValueError(f"{name} contains values that are not finite fp32")
        # Without memory for what a damaged specification asks for: the tensors of the file take their places.
        with torch.device("meta"):
            head = cls(spec)
            head.centroids = torch.empty(state["centroids"].shape)  # any number
        head.load_state_dict(state, assign=True)
        if head.centroids.ndim != 2 or head.centroids.shape[1] != spec.code_width:
            raise ValueError(f"its centroids are of shape {tuple(head.centroids.shape)}")
        if min(head.chunk_temperature, head.context_temperature) <= 0:
            raise ValueError("its temperature is not positive")
        return head

    def virus_margin(self, logits: Tensor) -> Tensor:
        """Log-odds of a virus, fp32 (n,), of logits (n, K), before calibration."""
        logits = logits.float()
        virus, other = logits.tensor_split([self.spec.num_virus], dim=1)
        return virus.logsumexp(1) - other.logsumexp(1)

    def chunk_margin(self, logits: Tensor) -> Tensor:
        """Calibrated log-odds of a virus, fp32 (n,), of logits of rows or chunks (n, K)."""
        return self.virus_margin(logits) / self.chunk_temperature

    def contig_margin(self, logits: Tensor, num_chunks: Tensor) -> Tensor:
        """Calibrated log-odds of a virus, fp32 (R,), of logits of contigs (R, K) with so many scored chunks (R,)."""
        intercept, slope = self.contig_temperature
        temperature = intercept + slope * num_chunks.clamp(min=1).float().log()
        margin: Tensor = self.virus_margin(logits) / temperature.clamp(*TEMPERATURE_BOUNDS)
        return margin

    @torch.inference_mode()
    def score_rows(self, features: Tensor, sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Scores of the codes, after rounding them to fp16."""
        assert sizes is not None
        dna, protein = features.tensor_split([self.spec.dna_width], dim=1)
        codes = self.row_codes(dna, protein, sizes).half()
        margin = self.chunk_margin(self.chunk(codes.float()))
        return {"scores": torch.stack((-margin, margin), dim=1).sigmoid(), "codes": codes}

    @torch.inference_mode()
    def score_contigs(self, rows: ScoredRows) -> ContigScores:
        """Reads the codes of rows in blocks: apart from arguments and result, this takes less than 1 kB a chunk."""
        first, block_chunks = rows.first_rows, 1 << 13
        bounds, chunks = np.append(first, len(rows.chunk)), rows.chunk[first]
        contig = rows.contig[chunks]
        counts = np.bincount(contig, minlength=rows.num_contigs)
        codes, logits = torch.empty((len(contig), CODE_WIDTH)), torch.empty((len(contig), len(self.classes)))
        # Blocks of contigs are scored in parallel, which takes less than threads that share each small product.
        with fixed_threads(1):
            for begin in range(0, len(first), block_chunks):
                end = min(begin + block_chunks, len(first))
                left, right = int(bounds[begin]), int(bounds[end])
                number = np.cumsum(np.diff(rows.chunk[left:right], prepend=rows.chunk[left]) > 0)
                own = torch.from_numpy(rows.read("codes", left, right)).float()
                codes[begin:end] = self.chunk_codes(own, torch.from_numpy(number), end - begin)
                logits[begin:end] = self.chunk(codes[begin:end])
            found = self.contigs(codes, torch.from_numpy(contig), rows.num_contigs)
            context, contig_logits, embedding = found
            is_scored = counts > 0
            if not all(map(is_finite, (logits, context, contig_logits[is_scored], embedding[is_scored]))):
                raise CheckpointError(
                    "the head produces non-finite scores: its weights are corrupt; download it again."
                )
            p_contig = _probabilities(self.contig_margin(contig_logits, torch.from_numpy(counts)))
            p_chunk, p_region = np.full((2, len(rows.contig)), np.nan)
            p_chunk[chunks] = _probabilities(self.chunk_margin(logits))
            p_region[chunks] = _probabilities(self.virus_margin(context) / self.context_temperature)
            novelty = self.novelty(embedding).double().numpy()
        virus, other = contig_logits.tensor_split([self.spec.num_virus], dim=1)
        best = torch.stack((other.argmax(1) + self.spec.num_virus, virus.argmax(1)), dim=1)
        return ContigScores(
            p_chunk=p_chunk,
            p_region=p_region,
            p_contig=np.where(is_scored, p_contig, np.nan),
            is_novel=is_scored & (novelty > float(self.novelty_limit)),
            contig_classes=np.where(is_scored[:, None], best.numpy(), -1),
            embedding=np.where(is_scored[:, None], embedding.numpy(), np.float32(np.nan)),
            novelty=np.where(is_scored, novelty, np.nan),
        )

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

    def contigs(
        self, codes: Tensor, contig: Tensor, num_contigs: int, segment_chunks: int = 1 << 12
    ) -> Contigs:
        """Reads the chunk codes (C, Z) of each contig in their order; `contig` int64 (C,) is ascending.

        A contig without chunks gets logits without a meaning. Long contigs are read in segments, so that apart from its
        arguments and results this takes memory for `segment_chunks` chunks only.
        """
        heads, reach = self.spec.pooling_heads, sum(_DILATIONS) * (_KERNEL // 2)
        context, weights = [], []
        pooled = torch.zeros(num_contigs, heads, self.spec.context_width // heads, device=codes.device)
        for begin in range(0, max(len(codes), 1), segment_chunks):
            end = min(begin + segment_chunks, len(codes))
            first, last = max(0, begin - reach), min(end + reach, len(codes))
            hidden = self.enter(codes[first:last])
            for block in self.blocks:
                hidden = block(hidden, contig[first:last])
            hidden = hidden[begin - first : end - first]
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
        )

    def novelty(self, embedding: Tensor) -> Tensor:
        """1 - cosine to the nearest centroid, fp32 (R,), 0..2, of embeddings (R, Z) of length 1; NaN without centroids."""
        if not len(self.centroids):
            return torch.full((len(embedding),), torch.nan)
        # In double precision, so that fp32 does not depend on how many are multiplied at a time.
        centroids = self.centroids.double().T
        nearest = [(part.double() @ centroids).amax(1) for part in embedding.split(1 << 12)]
        return (1 - torch.cat(nearest)).clamp(0, MAX_NOVELTY).float()


class _Linear(nn.Linear):
    """Multiplies in blocks of fixed shape on the CPU: rounding depends on the shape, and no contig should on others in the file."""

    def forward(self, rows: Tensor) -> Tensor:
        """(n, I) -> (n, O)."""
        if self.training or rows.device.type != "cpu":
            return super().forward(rows)
        block_rows = 256
        *blocks, last = rows.split(block_rows)
        blocks.append(functional.pad(last, (0, 0, 0, block_rows - len(last))))
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


def load_head(path: Path) -> Head:
    """Reads a head of the kind that its file states, in evaluation mode.

    Raises:
        CheckpointError: the file is damaged, holds other objects (whose code is not run), or is no such head.
    """
    kind: type[Head] = ContigHead if read_purpose(path).frames == "longest" else MLPClassifier
    try:
        head = kind._read(path)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not {kind._kind}, or is damaged: {error}.") from error
    return head.requires_grad_(False).eval()


def save_head(head: Head, path: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Writes a head as fp32 safetensors, atomically and reproducibly; `facts` go into the metadata as JSON."""
    state = {
        name: tensor.detach().cpu().float().contiguous()
        for name, tensor in head.state_dict().items()
        if name != "bn1.num_batches_tracked"
    }
    # One entry: safetensors writes several in an order that changes from process to process.
    stated = {**(facts or {}), **head.facts}
    metadata = {HEAD_METADATA: json.dumps(stated, sort_keys=True)} if stated else None
    with atomic_path(path) as temporary:
        # Not with save_file, whose files are for their owner alone.
        temporary.write_bytes(save(state, metadata))


def _probabilities(margin: Tensor) -> Float64:
    # torch's sigmoid rounds the last few values of an array differently.
    return np.asarray(np.exp(-np.logaddexp(0.0, -margin.double().numpy())))


@contextmanager
def fixed_threads(number: int) -> Iterator[None]:
    """Has torch compute with so many threads in this one.

    Rounding of matrix products depends on their number, and a head is to give the same bits on machines with any number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
