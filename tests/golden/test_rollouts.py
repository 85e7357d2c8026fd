"""Traversals of tiny images by every family and policy equal those frozen in rollouts.json."""

from functools import cache

import pytest

from tests.golden import adapter
from tests.golden.frozen import differences, rounded

IMAGES = ("square", "wide", "half", "empty")
GRID = [
    (family, policy, image)
    for family in adapter.MODELS
    for policy in adapter.POLICIES
    for image in IMAGES
]
ATOL = 1e-6

model_of = cache(adapter.build)


def roll(folder, family, policy, images):
    walk = adapter.POLICIES[policy]
    return adapter.rollout(model_of(family), folder, images, walk, told=policy == "told")


@pytest.mark.parametrize(("family", "policy", "image"), GRID)
def test_traversal(golden, folder, family, policy, image):
    (found,) = roll(folder, family, policy, [image])
    golden("rollouts").check(f"{family}/{policy}/{image}", found, atol=ATOL)


@pytest.mark.parametrize("option", adapter.OPTIONS)
def test_option(golden, folder, option):
    image, changes, walk = adapter.OPTIONS[option]
    model = adapter.build("tnet", changes)
    (found,) = adapter.rollout(model, folder, [image], walk, told=False)
    golden("rollouts").check(f"options/{option}", found, atol=ATOL)


@pytest.mark.parametrize("policy", adapter.POLICIES)
@pytest.mark.parametrize("family", adapter.MODELS)
def test_batch_equals_single_images(golden, folder, family, policy):
    images = ("wide", "empty", "square", "half")
    together = rounded(roll(folder, family, policy, images))
    stored = golden("rollouts").cases()
    alone = [stored[f"{family}/{policy}/{image}"] for image in images]
    assert differences(alone, together, atol=1e-5) == []


def test_every_stop_reason_is_frozen(golden):
    stored = golden("rollouts").cases().values()
    assert {each["stop"] for each in stored if "stop" in each} == {
        "levels", "pixels", "repeats", "empty", "budget", "confidence",
    }  # fmt: skip


def test_no_other_case_is_stored(golden):
    names = {"/".join(case) for case in GRID} | {f"options/{name}" for name in adapter.OPTIONS}
    golden("rollouts").keep(names)
