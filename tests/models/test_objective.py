"""Loss terms that families add to those of the aggregate."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch.nn import functional

from tests.models.test_saccader import step_by_hand
from tnetcli.models.base import Episodes, glimpse_loss, image_weights, mean_by_image, side_loss
from tnetcli.models.configs import AnchorNetObjective, DramObjective, SaccaderObjective
from tnetcli.models.dram import Emission
from tnetcli.models.registry import build_model, find_terms
from tnetcli.tasks import Classification
from tnetcli.testing.model import learned_parts, noise

CLASSES, LABEL = 3, 1
TASK = Classification(["a", "b", "c"])
SACCADER = {"view_size": 85, "width": 0.0625, "glimpses": 2}  # 2 x 2 places
DRAM = {
    "backbone": "compact",
    "view_size": 48,
    "glimpse_size": 16,
    "glimpses": 3,
    "state_size": 12,
}


def build(family, **changes):
    torch.manual_seed(0)
    config = {"saccader": SACCADER, "dram": DRAM}[family] | changes
    model = build_model(family, config, classes=CLASSES, bands=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # such as the gain of a residual
                parameter.fill_(0.3)
    return model.double().train()


def views_of(model, count=2):
    return noise(count, 1, model.view_size, model.view_size).double()


def encode(model, views):
    torch.manual_seed(7)
    return model(views, torch.zeros(len(views), 3))


def episodes_of(logits, aux, *, image=None, baseline=0.3):
    """Return rollouts of one level; each view is an image unless `image` says otherwise."""
    image = torch.arange(len(logits)) if image is None else torch.tensor(image)
    targets = torch.full((int(image.max()) + 1,), LABEL)
    rewards = mean_by_image(TASK.reward(logits, targets[image]), image, len(targets))
    every = torch.arange(len(logits))
    return Episodes(
        targets=targets,
        logits=logits[: len(targets)],
        level_logits=logits[None, : len(targets)],
        embedding=logits[: len(targets)],
        region_logits=logits,
        image=image,
        level=torch.ones_like(image),
        log_p=torch.zeros(len(logits)),
        entropy=torch.zeros(0),
        aux={name: (every, value) for name, value in aux.items()},
        advantage=rewards - baseline,
    )


def test_samples_are_of_every_image():
    episodes = episodes_of(noise(3, 3), {})
    assert replace(episodes, samples=3).samples == 3
    for samples in (0, 2):
        with pytest.raises(ValueError, match=f"3 images are not {samples} samples of each"):
            replace(episodes, samples=samples)


def test_side_logits_count_by_image_whatever_the_number_of_its_views():
    logits = noise(3, 2, 3)  # two of the first image, one of the second
    episodes = episodes_of(noise(3, 3), {"side_logits": logits}, image=[0, 0, 1])
    each = -logits.log_softmax(dim=2)[..., LABEL].sum(dim=1)  # (views,)
    expected = ((each[0] + each[1]) / 2 + each[2]) / 2
    torch.testing.assert_close(side_loss(episodes, TASK), expected)


def test_sampled_glimpses_are_weighted_by_the_advantage_of_their_image():
    log_p = torch.tensor([-1.0, -2.0, -5.0])
    episodes = episodes_of(noise(3, 3), {"log_p": log_p}, image=[0, 0, 1])
    episodes = replace(episodes, advantage=torch.tensor([0.5, -0.25]))
    assert glimpse_loss(episodes).item() == pytest.approx((0.5 * 3 - 0.25 * 5) / 2)


def test_rows_of_an_image_share_its_importance():
    task = Classification(["a", "b", "c"], class_weights={"b": 3.0})
    task.fit([0, 1])
    episodes = replace(episodes_of(noise(3, 3), {}, image=[0, 0, 1]), targets=torch.tensor([0, 1]))
    found = image_weights(episodes.image, episodes, task)
    assert found.tolist() == pytest.approx([0.125, 0.125, 0.75])
    weighted = image_weights(episodes.image, episodes, task, torch.tensor([3, 1, 0]))
    assert weighted.tolist() == pytest.approx([0.1875, 0.0625, 0])


def test_an_image_without_rows_has_a_mean_of_0():
    values, image = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2])
    assert mean_by_image(values, image, 3).tolist() == [2, 0, 5]
    assert mean_by_image(values, image, 3, torch.tensor([1, 3, 0])).tolist() == [2.5, 0, 0]


@pytest.mark.parametrize("family", ["saccader", "dram"])
def test_rewards_train_the_location_module_and_labels_the_rest(family):
    model = build(family)
    encode(model, views_of(model)).aux["log_p"].sum().backward()
    assert learned_parts(model) == {"location"}
    model.zero_grad()
    out = encode(model, views_of(model))
    loss = functional.cross_entropy(model.head(out.features), torch.tensor([0, 2]))
    if "side_logits" in out.aux:
        loss = loss + out.aux["side_logits"].square().sum()
    loss.backward()
    assert "location" not in learned_parts(model)
    assert {"backbone", "head"} <= learned_parts(model)


@pytest.mark.parametrize("family", ["saccader", "dram"])
def test_training_encodes_a_view_as_often_as_evaluation(family):
    model, passes = build(family), []
    model.backbone.register_forward_hook(lambda *_: passes.append(model.training))
    encode(model, views_of(model))
    encode(model.eval(), views_of(model))
    assert passes.count(True) == passes.count(False) > 0


# AnchorNet


def test_branches_of_an_anchornet_have_a_loss():
    terms, config = find_terms("anchornet"), AnchorNetObjective(side=0.5)
    episodes = episodes_of(noise(2, 3), {"side_logits": noise(2, 6, 3)})
    assert terms(episodes, TASK, config) == {"side": (0.5, side_loss(episodes, TASK))}
    assert terms(replace(episodes, aux={}), TASK, config) == {}  # no whole image was encoded


# Saccader


def enumerated(model, views, monkeypatch):
    """Yield each order of choosing positions, with its probability and the output."""
    places = model.grid.rows * model.grid.columns
    for order in permutations(range(places), model.glimpses):
        left = list(order)
        with monkeypatch.context() as patch:
            patch.setattr(
                "torch.multinomial",
                lambda chances, _: torch.full((len(chances), 1), left.pop(0)),  # noqa: B023
            )
            out = model(views, torch.zeros(1, 3))
        yield out.aux["log_p"][0].exp(), out


def test_the_expected_gradient_of_a_saccader_is_that_of_the_expected_reward(monkeypatch):
    model = build("saccader")
    views, where = views_of(model, 1), list(model.location.parameters())
    expected_reward, mean, total = 0.0, None, 0.0
    for chance, out in enumerated(model, views, monkeypatch):
        logits = model.head(out.features).detach()
        expected_reward = expected_reward + chance * logits.softmax(dim=1)[0, LABEL]
        total += chance.item()
        episodes = episodes_of(logits, out.aux)
        weight, loss = find_terms("saccader")(episodes, TASK, SaccaderObjective())["glimpses"]
        assert weight == 1
        found = torch.autograd.grad(loss, where, retain_graph=True)
        parts = [chance.item() * each for each in found]
        mean = parts if mean is None else [a + b for a, b in zip(mean, parts, strict=True)]
    exact = torch.autograd.grad(expected_reward, where)
    assert total == pytest.approx(1)
    assert max(float(each.abs().max()) for each in exact) > 1e-6
    for found, true in zip(mean, exact, strict=True):
        torch.testing.assert_close(-found, true, rtol=1e-6, atol=1e-10)


def test_places_to_imitate_are_those_that_score_highest_for_the_class_of_all():
    model = build("saccader", view_size=101, glimpses=3)  # 4 x 4 places
    views = views_of(model, 3)
    imitation = encode(model, views).aux["imitation"]
    wide, narrow = model.backbone(views)
    mixed = model.location.mixed(wide, narrow).detach().numpy()
    narrow = narrow.detach().flatten(2)
    weight = model.location.cell.score.weight[0].detach().numpy()
    for view in range(3):
        scores = [model.head(narrow[view, :, place]).tolist() for place in range(16)]
        sums = [sum(each) for each in zip(*scores, strict=True)]
        best = sums.index(max(sums))
        order = sorted(range(16), key=lambda place: -scores[place][best])[:6]  # twice the glimpses
        logs = [
            math.log(step_by_hand(mixed[view], weight, order[:number])[place])
            for number, place in enumerate(order)
        ]
        assert imitation[view].item() == pytest.approx(-sum(logs) / 6)


def test_no_more_positions_are_imitated_than_a_view_has():
    model = build("saccader", glimpses=3)  # twice as many would be 6 of 4
    assert encode(model, views_of(model)).aux["imitation"].isfinite().all()


def test_imitation_trains_the_location_module_only():
    model = build("saccader")
    out = encode(model, views_of(model))
    episodes = episodes_of(model.head(out.features).detach(), out.aux)
    weight, loss = find_terms("saccader")(episodes, TASK, SaccaderObjective(imitation=0.5))[
        "imitation"
    ]
    assert weight == 0.5
    torch.testing.assert_close(loss, out.aux["imitation"].mean())
    loss.backward()
    assert learned_parts(model) == {"location"}


def test_a_saccader_whose_location_is_frozen_learns_from_labels_alone():
    model = build("saccader")
    model.location.eval()
    out = encode(model, views_of(model))
    assert not out.aux
    episodes = episodes_of(model.head(out.features), out.aux)
    assert find_terms("saccader")(episodes, TASK, SaccaderObjective()) == {}


# DRAM


def test_a_dram_learns_the_label_before_the_last_glimpse():
    model = build("dram")
    views = views_of(model)
    out = encode(model, views)
    torch.manual_seed(7)
    glimpsed = model.glimpse(views, sample=True)
    side = out.aux["side_logits"]
    assert side.shape == (2, 3, CLASSES)
    torch.testing.assert_close(side[:, 0], model.head(glimpsed.context))
    torch.testing.assert_close(side[:, 1:], model.head(glimpsed.features[:, :2]))
    torch.testing.assert_close(out.aux["log_p"], glimpsed.log_p.sum(dim=1))
    episodes = episodes_of(model.head(out.features).detach(), out.aux)
    terms = find_terms("dram")(episodes, TASK, DramObjective(side=0.5, glimpses=2))
    assert terms == {
        "side": (0.5, side_loss(episodes, TASK)),
        "glimpses": (2, glimpse_loss(episodes)),
    }


def test_a_dram_with_a_frozen_location_module_samples_uniformly():
    model = build("dram", glimpses=1)
    model.location.eval()
    views = views_of(model, 1).expand(400, -1, -1, -1)
    out = encode(model, views)
    assert "log_p" not in out.aux
    episodes = episodes_of(model.head(out.features), out.aux)
    assert find_terms("dram")(episodes, TASK, DramObjective()).keys() == {"side"}
    torch.manual_seed(7)
    places = model.glimpse(views, sample=True, uniform=True).places.flatten()
    reach = 1 - 16 / 48
    assert places.abs().max() <= reach
    assert float(places.std()) == pytest.approx(reach / math.sqrt(3), rel=0.05)  # uniform
    still = model.eval().glimpse(views[:2]).places
    assert torch.equal(still, model.glimpse(views[:2]).places)


def test_the_expected_gradient_of_a_dram_is_that_of_the_expected_reward(monkeypatch):
    torch.manual_seed(0)
    deviation, reach = 0.3, 0.6
    emission = Emission(4, reach, deviation).double()
    steps = torch.linspace(-8, 8, 4001, dtype=torch.float64)  # so many deviations from the mean
    chances = torch.distributions.Normal(0, 1).log_prob(steps).exp() * (steps[1] - steps[0])
    nodes = torch.stack([steps, torch.zeros_like(steps)], dim=1)
    monkeypatch.setattr("torch.randn_like", lambda like: nodes.to(like))
    seen = noise(1, 4).double().expand(len(steps), -1)
    drawn = emission(seen, None, sample=True)
    rewards = drawn.place[:, 0].double()  # the row, clamped at the edge
    (found,) = torch.autograd.grad((chances * rewards * drawn.log_p).sum(), emission.place.bias)
    mean = emission(seen[:1], None, sample=False).mean[0, 0]
    normal = torch.distributions.Normal(0.0, 1.0)
    inside = normal.cdf((reach - mean) / deviation) - normal.cdf((-reach - mean) / deviation)
    slope = torch.autograd.grad(mean, emission.place.bias)[0]
    torch.testing.assert_close(found, inside.detach() * slope, rtol=1e-4, atol=1e-7)
