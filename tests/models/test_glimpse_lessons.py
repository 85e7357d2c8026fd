"""What Saccader and DRAM learn from beside the label of their conclusion."""

import math
from itertools import permutations

import pytest
import torch
from tnetcli.training.baselines import Baselines
from tnetcli.training.losses import Taught, Walked, learn
from torch.nn import functional

from tests.models.contract import ROOT, learned_parts, noise
from tests.models.test_saccader import step_by_hand
from tnetcli.models.dram import Emission
from tnetcli.models.registry import build_model
from tnetcli.sections import Loss

CLASSES, LABEL = 3, 1
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
    arguments = {"saccader": SACCADER, "dram": DRAM}[family] | changes
    model = build_model(family, arguments, classes=CLASSES, bands=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # else what a ResNet starts by adding 0 times tells nothing
                parameter.fill_(0.3)
    return model.double().train()


def views_of(model, count=2):
    return noise(count, 1, model.view_size, model.view_size).double()


def study(model, views):
    torch.manual_seed(7)
    return model.study(views, [ROOT] * len(views))


def walked(model, looked, lessons):
    """What a walk of one level comes to, each view an image."""
    scores = model.classify(looked.features)
    images = torch.arange(len(scores))
    return Walked(
        labels=torch.full((len(scores),), LABEL),
        scores=scores,
        level_scores=scores.unsqueeze(0),
        concluded=looked.features,
        window_scores=scores,
        image=images,
        level=torch.ones_like(images),
        log_p=torch.zeros(len(scores)),
        entropy=torch.zeros(0),
        taught=(Taught(lessons, images),),
    )


def blame(model, looked, lessons, **weights):
    """The loss of a step that has these weights, beside that of the label."""
    loss = Loss(sequence=1, reinforce=0, **{"glimpses": 0, "side": 0, "imitation": 0, **weights})
    baselines = Baselines(loss.baseline, 1, start=0.3)
    return learn(walked(model, looked, lessons), loss, baselines).total


@pytest.mark.parametrize("family", ["saccader", "dram"])
def test_to_study_is_to_look_and_looks_once(family):
    model = build(family)
    views = views_of(model)
    passes = []
    model.backbone.register_forward_hook(lambda *_: passes.append(1))
    looked, _ = study(model, views)
    times = len(passes)
    torch.manual_seed(7)
    again = model.look(views, [ROOT] * 2)
    assert times == len(passes) - times
    torch.testing.assert_close(looked.features, again.features)
    torch.testing.assert_close(looked.attention, again.attention)


@pytest.mark.parametrize("family", ["saccader", "dram"])
def test_rewards_teach_where_to_look_and_labels_what_is_seen(family):
    model = build(family)
    looked, lessons = study(model, views_of(model))
    lessons.log_p.sum().backward()
    assert learned_parts(model) == {"location"}
    model.zero_grad()
    looked, lessons = study(model, views_of(model))
    labels = torch.tensor([0, 2])
    loss = functional.cross_entropy(model.classify(looked.features), labels)
    if lessons.scores is not None:
        loss = loss + lessons.scores.square().sum()
    loss.backward()
    assert "location" not in learned_parts(model)
    assert {"backbone", "classifier"} <= learned_parts(model)


# Saccader


def enumerated(model, views, monkeypatch):
    """Yield each way to visit places, with how likely it is and what a step makes of it."""
    places = model.grid.rows * model.grid.columns
    for order in permutations(range(places), model.glimpses):
        left = list(order)
        with monkeypatch.context() as patch:
            patch.setattr(
                "torch.multinomial",
                lambda chances, _: torch.full((len(chances), 1), left.pop(0)),  # noqa: B023
            )
            looked, lessons = model.study(views, [ROOT])
        yield lessons.log_p[0].exp(), looked, lessons


def test_the_expected_gradient_of_a_saccader_is_that_of_the_expected_reward(monkeypatch):
    model = build("saccader")
    views, where = views_of(model, 1), list(model.location.parameters())
    expected_reward, mean, total = 0.0, None, 0.0
    for chance, looked, lessons in enumerated(model, views, monkeypatch):
        reward = model.classify(looked.features).softmax(dim=1)[0, LABEL].detach()
        expected_reward = expected_reward + chance * reward
        total += chance.item()
        loss = blame(model, looked, lessons, glimpses=1)
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
    _, lessons = study(model, views)
    wide, narrow = model.backbone(views)
    mixed = model.location.mixed(wide, narrow).detach().numpy()
    narrow = narrow.detach().flatten(2)
    weight = model.location.cell.score.weight[0].detach().numpy()
    for view in range(3):
        scores = [model.classifier(narrow[view, :, place]).tolist() for place in range(16)]
        sums = [sum(each) for each in zip(*scores, strict=True)]
        best = sums.index(max(sums))
        order = sorted(range(16), key=lambda place: -scores[place][best])[:6]  # twice the glimpses
        logs = [
            math.log(step_by_hand(mixed[view], weight, order[:number])[place])
            for number, place in enumerate(order)
        ]
        assert lessons.own[view].item() == pytest.approx(-sum(logs) / 6)


def test_imitation_follows_no_more_places_than_there_are():
    _, lessons = study(build("saccader", glimpses=3), noise(2, 1, 85, 85).double())
    assert lessons.own.isfinite().all()


def test_imitation_teaches_the_location_only():
    model = build("saccader")
    study(model, views_of(model))[1].own.sum().backward()
    assert learned_parts(model) == {"location"}


def test_a_saccader_whose_location_is_frozen_has_no_other_lessons():
    model = build("saccader")
    model.location.eval()
    assert study(model, views_of(model))[1] is None


# DRAM


def test_a_dram_knows_something_before_the_last_glimpse():
    model = build("dram")
    views = views_of(model)
    _, lessons = study(model, views)
    torch.manual_seed(7)
    glimpsed = model.glimpse(views, sample=True)
    assert lessons.scores.shape == (2, 3, CLASSES)
    torch.testing.assert_close(lessons.scores[:, 0], model.classifier(glimpsed.context))
    torch.testing.assert_close(lessons.scores[:, 1:], model.classifier(glimpsed.features[:, :2]))
    torch.testing.assert_close(lessons.log_p, glimpsed.log_p.sum(dim=1))


def test_a_dram_whose_location_is_frozen_looks_anywhere():
    model = build("dram", glimpses=1)
    model.location.eval()
    views = views_of(model, 1).expand(400, -1, -1, -1)
    _, lessons = study(model, views)
    assert lessons.log_p is None
    torch.manual_seed(7)
    places = model.glimpse(views, sample=True, anywhere=True).places.flatten()
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
    rewards = drawn.place[:, 0].double()  # how far down it looked, cut at the edge
    (found,) = torch.autograd.grad((chances * rewards * drawn.log_p).sum(), emission.place.bias)
    mean = emission(seen[:1], None, sample=False).mean[0, 0]
    normal = torch.distributions.Normal(0.0, 1.0)
    inside = normal.cdf((reach - mean) / deviation) - normal.cdf((-reach - mean) / deviation)
    slope = torch.autograd.grad(mean, emission.place.bias)[0]
    torch.testing.assert_close(found, inside.detach() * slope, rtol=1e-4, atol=1e-7)
