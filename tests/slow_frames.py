"""A slow oracle of chunks, open frames and longest ORFs that applies the rules one by one."""

from math import ceil, floor

from Bio.Seq import Seq


def slow_chunks(length: int, k: int) -> list[tuple[int, int]]:
    """(start, end) of each chunk of a record."""
    n = ceil(length / k)
    r = n * k - length
    base = floor(r / n)
    up = r - base * (n - 1)
    overlaps = ([base + 1] * up + [base] * (n - 1 - up) + [0])[:n]
    starts = [i * k - sum(overlaps[:i]) for i in range(n)]
    return [(start, min(length, start + k)) for start in starts]


def slow_strands(chunk: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """The strands by the first letter of their frames."""
    return ("F", chunk), ("R", chunk[::-1].translate(str.maketrans("ACGT", "TGCA")))


def slow_frames(chunk: str) -> list[tuple[str, int, str, str]]:
    """(frame, start, nucleotide, protein) of each open reading frame of a chunk."""
    found = []
    for direction, strand in slow_strands(chunk):
        for f in range(3):
            codons = [strand[i : i + 3] for i in range(f, len(strand) - 2, 3)]
            pure = "".join(codon for codon in codons if set(codon) <= set("ACGT"))
            protein = str(Seq(pure).translate())
            if protein and "*" not in protein:
                found.append((f"{direction}{f + 1}", f, strand[f : f + 1 + 3 * len(protein)], protein))
    return found


def slow_orfs(chunk: str) -> list[tuple[str, int, str, str]]:
    """(frame, start, nucleotide, protein) of the longest ORFs of a chunk."""
    longest = []
    for direction, strand in slow_strands(chunk):
        for f in range(3):
            codons = [strand[i : i + 3] for i in range(f, len(strand) - 2, 3)]
            letters = [str(Seq(codon).translate()) if set(codon) <= set("ACGT") else "*" for codon in codons]
            protein = max("".join(letters).split("*"), key=len)
            if len(protein) >= 10:
                start = f + 3 * "".join(letters).index(protein)
                longest.append(
                    (f"{direction}{f + 1}", start, strand[start : start + 3 * len(protein)], protein)
                )
    kept = sorted(longest, key=lambda row: -len(row[3]))[:2]
    if kept and 10 * 3 * len(kept[0][3]) >= 6 * len(chunk):
        kept = kept[:1]
    return [row for row in longest if row in kept]
