import pytest
import torch

from virnuc_core.models.encoder import mean_pool

BOUNDS = torch.tensor([0, 4, 6, 7, 7, 12], dtype=torch.int32)


def _hidden_states() -> torch.Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(0))


def test_means_over_all_tokens() -> None:
    hidden_states = _hidden_states()
    means = mean_pool(hidden_states, BOUNDS, include_special_tokens=True)
    for row, (begin, end) in enumerate(
        [(0, 4), (4, 6), (6, 7), None, (7, 12)][i] or (0, 0) for i in range(5)
    ):
        expected = hidden_states[begin:end].mean(0) if end > begin else torch.zeros(5)
        torch.testing.assert_close(means[row], expected)


def test_means_over_residues_leave_out_both_ends() -> None:
    hidden_states = _hidden_states()
    means = mean_pool(hidden_states, BOUNDS, include_special_tokens=False)
    torch.testing.assert_close(means[0], hidden_states[1:3].mean(0))
    torch.testing.assert_close(means[4], hidden_states[8:11].mean(0))
    assert not means[1:4].any(), "sequences without residues give zeros"


@pytest.mark.parametrize("specials", [True, False])
def test_a_mean_does_not_depend_on_batch_mates(specials: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randn(50, 7, generator=generator)
    alone = mean_pool(sequence, torch.tensor([0, 50]), include_special_tokens=specials)
    mates = 1e4 * torch.randn(90, 7, generator=generator)
    packed = torch.cat((mates[:33], sequence, mates[33:]))
    together = mean_pool(packed, torch.tensor([0, 33, 83, 140]), include_special_tokens=specials)
    assert torch.equal(together[1], alone[0])


def test_sums_in_fp32_for_half_precision() -> None:
    hidden_states = torch.full((4096, 2), 40.0, dtype=torch.float16)
    means = mean_pool(hidden_states, torch.tensor([0, 4096]), include_special_tokens=True)
    assert means.dtype == torch.float32
    torch.testing.assert_close(means, torch.full((1, 2), 40.0))


def test_gradients_flow() -> None:
    hidden_states = _hidden_states().requires_grad_()
    mean_pool(hidden_states, BOUNDS, include_special_tokens=False).sum().backward()
    assert hidden_states.grad is not None
    assert hidden_states.grad[1:3].unique().tolist() == [0.5]
    assert not hidden_states.grad[[0, 3, 4, 5, 6]].any()
