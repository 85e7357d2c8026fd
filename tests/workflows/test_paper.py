import json

import pytest
import torch
from torch import nn

from tests.models.contract import noise
from tnetcli.models.papers import PAPERS
from tnetcli.models.registry import build_model
from tnetcli.workflows.paper import Comparison, Figure, as_json, as_text, compare
from tnetcli.workflows.paper_maps import BRANCHES, count_tried, see_maps


@pytest.mark.parametrize(
    ("ours", "agrees"),
    [(1_544_999_999, "digits"), (1_545_600_000, "within 0.01"), (1_560_000_000, "no")],
)
def test_agreement_is_told_by_digits(ours, agrees):
    assert Figure("multiplications", 1.54, ours).agrees == agrees


@pytest.mark.parametrize(
    ("expected", "ours", "digits", "agrees"),
    [
        (1.6, 1_550_601, 1, "digits"),
        (1.6, 1_549_999, 1, "within 0.1"),
        (1.6, 1_700_000, 1, "within 0.1"),
        (1.6, 1_700_001, 1, "no"),
        (1.6, 1_550_601, 2, "no"),
    ],
)
def test_agreement_is_by_the_digits_that_are_printed(expected, ours, digits, agrees):
    assert Figure("trainable", expected, ours, digits=digits).agrees == agrees


@pytest.mark.parametrize(("ours", "agrees"), [(111, "digits"), (110, "no"), (112, "no")])
def test_a_count_agrees_or_it_does_not(ours, agrees):
    figure = Figure("side", 111, ours, digits=0, of="head")
    assert (figure.agrees, figure.unit, figure.difference) == (agrees, 1, ours - 111)


def test_a_figure_that_does_not_agree_is_told():
    compared = compare("en-b0-fmow-448", PAPERS["en-b0-fmow-448"])
    wrong = Comparison("en", compared.published, (Figure("total", 9.99, 4_128_986),))
    text = as_text([compared, wrong])
    assert "1 of 3 figures agree in every digit, 1 nearly, 1 do not" in text
    assert "-5.8610" in text
    assert "Not met:" in text
    assert (compared.is_met, wrong.is_met) == (True, False)


def test_why_a_figure_is_not_met_is_told_once_for_all_that_it_is_true_of():
    dram = [compare(name, PAPERS[name]) for name in ("dram-2", "dram-4")]
    text = as_text(dram)
    assert text.count("recurrent layers") == 1
    assert "dram-2, dram-4: what is printed" in text
    assert "0 of 4 figures agree in every digit, 0 nearly, 4 do not" in text
    assert json.loads(as_json(dram[0]))["reason"] == PAPERS["dram-2"].reason
    assert json.loads(as_json(compare("bagnet-77", PAPERS["bagnet-77"])))["reason"] is None


def test_nothing_is_cut_off(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    name = "two-stream-cub-vgg19"
    text = as_text([compare(name, PAPERS[name])])
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= 100


def support(run, side):
    """Return from where to where the middle of a map learns, in pixels of the view."""
    view = noise(1, 3, side, side).requires_grad_(True)
    seen = run(view)  # (1, channels, height, width)
    middle = seen.shape[2] // 2
    seen[0, :, middle, middle].sum().backward()
    rows = view.grad[0].abs().sum(dim=(0, 2)).nonzero().flatten()
    return seen.shape[2], int(rows[-1] - rows[0]) + 1


def test_maps_are_as_large_and_see_as_much_as_gradients_tell():
    # Without squeeze-excite, whose gates see everything.
    torch.manual_seed(0)
    arguments = {"backbone": "anchornet", "view_size": 160, "squeeze": "none"}
    model = build_model("anchornet", arguments, classes=3).double().eval()
    for activation in [*model.modules()]:  # nothing is lost to what is below zero
        for name, child in activation.named_children():
            if isinstance(child, nn.ReLU | nn.Hardswish):
                setattr(activation, name, nn.Identity())
    names = ("anchor.head.3", "anchor.head.10", *BRANCHES)
    head = model.anchor.head
    runs = (
        nn.Sequential(*[*head][:4]),
        nn.Sequential(*[*head][:11]),
        *(lambda x, branch=branch: branch.blocks(head(x)) for branch in model.anchor.branches),
    )
    found = see_maps(model, names)
    for name, run in zip(names, runs, strict=True):
        assert found[name] == support(lambda x, run=run: run(x.double()), 160)


def test_seeing_maps_leaves_no_hook_behind():
    with torch.device("meta"):
        model = build_model("anchornet", {"backbone": "anchornet"}, classes=3).eval()
    with pytest.raises(AttributeError):
        see_maps(model, ["anchor.head.0", "anchor.no.such"])
    see_maps(model, ["anchor.head.0"])
    assert not any(module._forward_hooks for module in model.modules())


def test_tried_are_whole_parts_of_the_positions():
    assert count_tried("strict", (21, 17, 15)) == [22, 11, 6]
    assert count_tried("loose", (21, 17, 15)) == [132, 86, 67]
