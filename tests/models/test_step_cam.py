import pytest
import torch

from tests.models.contract import noise
from tnetcli.models.step_cam import step_cam
from tnetcli.models.two_stream import TwoStream
from tnetcli.models.two_stream_arguments import TwoStreamArguments

STEP = 1e-6  # of finite differences, in double precision


def build(**more):
    torch.manual_seed(0)
    arguments = TwoStreamArguments(
        backbone="compact", view_size=32, state_size=8, step_count=3, **more
    )
    model = TwoStream(arguments, classes=4).eval().double().requires_grad_(False)
    with torch.no_grad():  # of small random weights steps say next to nothing
        for part in (model.local_stream.memory, model.local_stream.classifier):
            for parameter in part.parameters():
                parameter.mul_(3)
    return model


VIEW = noise(3, 32, 32, seed=5).double()


def score(stream, seen, step, label):
    return float(stream.classifier(stream.think(seen)[:, step - 1])[0, label])


def by_finite_differences(stream, seen, step, label):
    """Return the gradient (channels, height, width) of a step's score, one number at a time."""
    gradient = torch.zeros_like(seen[0])
    for index in torch.cartesian_prod(*(torch.arange(n) for n in seen.shape[1:])).tolist():
        apart = torch.zeros_like(seen)
        apart[0][tuple(index)] = STEP
        up, down = (score(stream, seen + sign * apart, step, label) for sign in (1, -1))
        gradient[tuple(index)] = (up - down) / (2 * STEP)
    return gradient


@pytest.mark.parametrize("more", [{}, {"self_attention": True, "basis_channels": 4}])
@pytest.mark.parametrize(("step", "label"), [(1, 0), (3, 2)])
def test_the_map_is_that_of_finite_differences(more, step, label):
    model = build(**more)
    stream = model.local_stream
    seen = stream.see(VIEW.unsqueeze(0))
    weights = by_finite_differences(stream, seen, step, label).mean(dim=(1, 2))
    expected = torch.zeros(seen.shape[2:]).double()
    for weight, channel in zip(weights, seen[0], strict=True):
        expected += weight * channel
    found = step_cam(model, VIEW, step, label)
    assert found.shape == seen.shape[2:] == (2, 2)
    torch.testing.assert_close(found, expected.clamp(min=0), rtol=0, atol=1e-7)


def test_of_a_vector_that_is_a_mean_all_pixels_have_the_same_gradient():
    model = build()
    stream = model.local_stream
    seen = stream.see(VIEW.unsqueeze(0))
    vector = stream.backbone.pool(seen).requires_grad_(True)
    wanted = stream.classifier(stream.memory(vector, 3)[0, 1])[3]
    (gradient,) = torch.autograd.grad(wanted, vector)  # (1, channels)
    expected = torch.einsum("c,chw->hw", gradient[0] / 4, seen[0]).clamp(min=0)
    torch.testing.assert_close(step_cam(model, VIEW, 2, 3), expected)


def test_steps_and_classes_have_maps_of_their_own():
    model = build()
    maps = [step_cam(model, VIEW, step, label) for step in (1, 2, 3) for label in range(4)]
    assert sum(bool(each.any()) for each in maps) > 3
    assert all((each >= 0).all() for each in maps)
    some = [each for each in maps if each.any()]
    assert all(not torch.allclose(a, b) for i, a in enumerate(some) for b in some[:i])


def test_a_model_that_learns_is_left_as_it_was():
    model = build().requires_grad_(True).train()
    model.local_stream.backbone.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        found = step_cam(model, VIEW, 2, 1)
    assert not found.requires_grad
    assert torch.equal(found, step_cam(model.eval(), VIEW, 2, 1))
    model.train()
    step_cam(model, VIEW, 2, 1)
    assert model.local_stream.classifier.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_parts_keep_their_modes():
    model = build().train()
    model.local_stream.backbone.eval()
    step_cam(model, VIEW, 1, 0)
    assert not model.local_stream.backbone.net.training
    assert model.local_stream.memory.training


def test_a_larger_view_is_shrunk_as_when_it_is_looked_at():
    model = build(local_size=16)
    halved = VIEW.unfold(1, 2, 2).unfold(2, 2, 2).mean(dim=(3, 4))  # (3, 16, 16)
    torch.testing.assert_close(step_cam(model, VIEW, 2, 1), step_cam(model, halved, 2, 1))


@pytest.mark.parametrize("step", [-1, 0, 4])
def test_a_step_that_is_not_made_is_refused(step):
    with pytest.raises(ValueError, match=f"there is no step `{step}`: the model makes 3"):
        step_cam(build(), VIEW, step, 0)


def test_a_model_without_steps_has_none_to_show():
    torch.manual_seed(0)
    model = TwoStream(TwoStreamArguments(backbone="compact", view_size=32, steps="none"), classes=2)
    with pytest.raises(ValueError, match="the model makes 0"):
        step_cam(model, VIEW.float(), 1, 0)


@pytest.mark.parametrize("label", [-1, 4])
def test_an_unknown_class_is_refused(label):
    with pytest.raises(ValueError, match=f"there is no class `{label}`"):
        step_cam(build(), VIEW, 1, label)


@pytest.mark.parametrize("shape", [(32, 32), (1, 3, 32, 32), (4, 32, 32)])
def test_what_is_no_view_is_refused(shape):
    with pytest.raises(ValueError, match="not a view of 3 bands"):
        step_cam(build(), torch.zeros(shape).double(), 1, 0)
