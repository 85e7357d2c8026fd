import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tnetcli.looking import Looker
from tnetcli.training.baselines import Baselines
from tnetcli.training.losses import learn
from tnetcli.training.walking import Batch, UnreadableError, Walker
from tnetcli.views import Views, root_window

from tests.images import noise, write_geotiff
from tests.runs import MODEL, UNIT
from tnetcli.errors import ImageError, ModelError
from tnetcli.models.registry import build_model
from tnetcli.readers.open import open_image
from tnetcli.sections import Loss
from tnetcli.traversal import Plan

CPU = torch.device("cpu")
PAPER = Loss(rule="paper")
THREE = Plan(levels=3, keep=(2, 1), once=False)
TWO = Plan(levels=2, keep=(2,), once=False)
LABELS = [0, 2, 1, 2]


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walking")
    made = [noise((200, 160), seed=number) for number in range(4)]
    opened = [
        open_image(write_geotiff(folder / f"{number}.tif", each))
        for number, each in enumerate(made)
    ]
    yield opened
    for reader in opened:
        reader.close()


class Noted:
    """Wraps `look` of a model and keeps what went in and came out."""

    def __init__(self, model):
        self._look, self.calls = model.look, []
        model.look = self

    def __call__(self, views, regions, *, score_cells=True):
        looked = self._look(views, regions, score_cells=score_cells)
        self.calls.append((list(regions), looked))
        return looked

    @property
    def regions(self):
        return [region for regions, _ in self.calls for region in regions]

    @property
    def features(self):
        return torch.cat([looked.features for _, looked in self.calls])


@pytest.fixture
def model():
    torch.manual_seed(3)
    arguments = {key: value for key, value in MODEL.items() if key != "classes"}
    made = build_model("tnet", arguments, classes=3)
    for _ in range(20):  # let the running statistics be those of such views
        made.backbone(torch.randn(8, 3, 32, 32))
    return made.eval()


@pytest.fixture
def views(model):
    with Views(model.view_size, model.grid, UNIT, threads=1) as made:
        yield made


def batch_of(readers, views, labels=None, seeds=None):
    labels = LABELS[: len(readers)] if labels is None else labels
    return Batch(
        readers,
        labels,
        list(range(10, 10 + len(readers))) if seeds is None else seeds,
        [reader.path for reader in readers],
        [views.submit(reader, root_window(reader.size, "stretch")) for reader in readers],
    )


def walker_of(model, views, plan=THREE, loss=PAPER, **options):
    return Walker(model, views, plan, loss, fit="stretch", device=CPU, **options)


def walk(model, views, readers, plan=THREE, loss=PAPER, **options):
    return walker_of(model, views, plan, loss, **options).walk(batch_of(readers, views))


def cell_of(parent, child, grid):
    """Return which cell of a region another region is."""
    found = [
        (row, column)
        for row, column in grid.cells()
        if parent.child(grid, row, column).window == child.window
    ]
    (cell,) = found
    return cell


def test_the_best_windows_and_the_scores_are_those_of_a_prediction(model, views, readers):
    noted = Noted(model)
    walked = walk(model, views, readers)
    with Looker(model, UNIT, device="cpu", threads=1) as looker:
        sights = looker.look(readers, THREE)
    for image, sight in enumerate(sights):
        mine = (walked.image == image).nonzero().flatten().tolist()
        windows = [visit.place.region.window for visit in sight.visits]
        assert [noted.regions[i].window for i in mine] == windows
        assert walked.level[mine].tolist() == [v.place.region.level for v in sight.visits]
        close = {"rtol": 1e-4, "atol": 1e-5}
        assert np.allclose(walked.scores[image].detach(), sight.scores, **close)
        assert np.allclose(walked.level_scores[:, image].detach(), sight.level_scores, **close)
        assert np.allclose(walked.window_scores[mine].detach(), sight.window_scores, **close)


def test_conclusions_of_each_level_are_those_of_the_windows_down_to_it(model, views, readers):
    noted = Noted(model)
    walked = walk(model, views, readers)
    assert walked.level_scores.shape == (3, 4, 3)
    for depth in (1, 2, 3):
        for image in range(4):
            own = (walked.image == image) & (walked.level <= depth)
            features = noted.features[own]
            told = model.conclude(features[None], torch.ones(1, len(features), dtype=torch.bool))
            assert torch.allclose(walked.level_scores[depth - 1, image], told.scores[0], atol=1e-5)
            if depth == 3:
                assert torch.allclose(walked.concluded[image], told.features[0], atol=1e-5)
                assert torch.equal(walked.scores, walked.level_scores[-1])


def test_an_image_that_ends_early_keeps_its_conclusion(model, views, readers, tmp_path):
    small = open_image(write_geotiff(tmp_path / "small.tif", noise((60, 60))))
    plan = replace(THREE, least_side=40)
    with small:
        walked = walk(model, views, [small, readers[0]], plan)
        alone = walk(model, views, [small], plan)
    assert (walked.image == 0).sum() == 1
    assert torch.equal(walked.level_scores[1, 0], walked.level_scores[0, 0])
    assert torch.allclose(walked.scores[0], alone.scores[0], atol=1e-5)
    assert not torch.allclose(walked.level_scores[1, 1], walked.level_scores[0, 1])


def test_the_papers_probability_of_a_window_is_its_own_attention(model, views, readers):
    noted = Noted(model)
    walked = walk(model, views, readers)
    first = 0
    assert walked.log_p[walked.level == 1].tolist() == [0.0] * 4
    for (parents, looked), (children, _) in zip(noted.calls, noted.calls[1:], strict=False):
        below = first + len(parents)
        keep = 2 if parents[0].level == 1 else 1
        for number, child in enumerate(children):
            parent = number // keep
            row, column = cell_of(parents[parent], child, model.grid)
            by_hand = math.log(looked.attention[parent, row, column].item() + 1e-10)
            assert walked.log_p[below + number].item() == pytest.approx(by_hand, abs=1e-5)
        first = below


def test_a_draw_is_as_probable_as_its_cells_in_the_order_they_were_drawn(model, views, readers):
    loss = Loss(selection="sample", uniform=0.2, temperature=1.7)
    noted = Noted(model)
    walked = walk(model, views, readers, TWO, loss)
    parents, looked = noted.calls[0]
    for image in range(4):
        attention = looked.attention[image].flatten().double().detach().numpy()
        chances = 0.8 * attention + 0.2 / 9
        random = np.random.default_rng([10 + image, *parents[image].path.encode()])
        gumbel = random.gumbel(size=9)
        order = np.argsort(-(np.log(chances) + 1.7 * gumbel))[:2]
        weights = chances ** (1 / 1.7)
        by_hand = {
            order[0]: math.log(weights[order[0]] / weights.sum()),
            order[1]: math.log(weights[order[1]] / (weights.sum() - weights[order[0]])),
        }
        below = ((walked.image == image) & (walked.level == 2)).nonzero().flatten().tolist()
        for window in below:
            row, column = cell_of(parents[image], noted.regions[window], model.grid)
            expected = by_hand.pop(3 * row + column)
            assert walked.log_p[window].item() == pytest.approx(expected, abs=1e-4)
        assert not by_hand


def test_a_walk_that_is_drawn_depends_on_the_seeds_alone(model, views, readers):
    loss = Loss(selection="sample")
    noted = Noted(model)
    walker = walker_of(model, views, TWO, loss)
    for seeds in ([1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]):
        walker.walk(batch_of(readers, views, seeds=seeds))
    one, same, other = (
        [region.window for region in noted.calls[number][0]] for number in (1, 3, 5)
    )
    assert one == same
    assert one != other


def test_samples_of_an_image_lie_side_by_side(model, views, readers):
    loss = Loss(selection="sample", samples=3, uniform=0.9)
    noted = Noted(model)
    walked = walk(model, views, readers[:2], TWO, loss)
    assert walked.samples == 3
    assert walked.labels.tolist() == [0, 0, 0, 2, 2, 2]
    roots, _ = noted.calls[0]
    assert len(roots) == 6
    first = walked.window_scores[walked.level == 1]
    alone = walk(model, views, readers[:2], TWO).window_scores[:2]
    for sample in range(6):
        assert torch.allclose(first[sample], alone[sample // 3], atol=1e-5)
    chosen = [
        tuple(noted.regions[i].window for i in (walked.image == s).nonzero().flatten().tolist())
        for s in range(6)
    ]
    assert len(set(chosen)) > 2  # they are drawn one by one


def test_seeds_of_samples_are_all_different(readers, views):
    seeds = batch_of(readers, views, seeds=[0, 1, 2, 3]).repeated(4).seeds
    assert len(set(seeds)) == 16


def test_some_images_of_a_batch_keep_all_that_belongs_to_them(readers, views):
    batch = batch_of(readers, views)
    part = batch.only([3, 1])
    assert part.readers == [readers[3], readers[1]]
    assert part.labels == [2, 2]
    assert part.seeds == [13, 11]
    assert part.names == [readers[3].path, readers[1].path]
    assert part.first == [batch.first[3], batch.first[1]]


def gradients(model, loss, walked):
    """Return the gradient of each part, None where nothing reaches it."""
    names, weights = zip(*model.named_parameters(), strict=True)
    losses = learn(walked, loss, Baselines(loss.baseline, 3))
    found = torch.autograd.grad(losses.total, weights, retain_graph=True, allow_unused=True)
    return dict(zip(names, found, strict=True))


def parts_of(found, *parts):
    return {name: each for name, each in found.items() if name.split(".")[0] in parts}


SEEING = ("backbone", "position", "classifier", "weighting")


@pytest.mark.parametrize("rule", ["paper", "free"])
def test_rewards_teach_the_location_module_alone_and_labels_all_the_rest(
    model, views, readers, rule
):
    loss = Loss(rule=rule, reinforce=0.0)
    walked = walk(model.train(), views, readers, THREE, loss)
    by_labels = gradients(model, loss, walked)
    by_both = gradients(model, loss.model_copy(update={"reinforce": 1000.0}), walked)
    location = parts_of(by_labels, "location")
    assert location
    assert all(each is None or not each.any() for each in location.values())
    for name, each in parts_of(by_labels, *SEEING).items():
        assert each is not None, name
        assert torch.equal(each, by_both[name]), name
    assert all(each.any() for each in parts_of(by_labels, "classifier", "backbone").values())
    moved = [each for each in parts_of(by_both, "location").values() if each is not None]
    assert sum(bool(each.any()) for each in moved) > len(location) / 2


def test_cells_without_data_are_never_drawn(model, views, tmp_path):
    image = noise((200, 200))
    image[:, :, 90:] = 0
    path = write_geotiff(tmp_path / "half.tif", image, nodata=0)
    loss = Loss(selection="sample", uniform=0.9)
    noted = Noted(model)
    with open_image(path) as reader:
        batch = batch_of([reader] * 4, views)
        walked = walker_of(model, views, TWO, loss).walk(batch)
    lefts = {region.window.left for region in noted.calls[1][0]}
    assert lefts <= {0.0, 50.0}
    _, looked = noted.calls[0]
    attention = looked.attention[0].flatten() * torch.tensor([1, 1, 0] * 3)
    shares = attention / attention.sum()
    entropy = -(shares[shares > 0] * shares[shares > 0].log()).sum() / math.log(6)
    assert walked.entropy[0].item() == pytest.approx(entropy.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("crops", "side", "levels"), [(False, 128, 3), (False, 127, 2), (True, 64, 3), (True, 63, 2)]
)
def test_cells_end_where_they_do_in_prediction_but_for_crops(
    model, views, tmp_path, crops, side, levels
):
    # Cells of the second level have a quarter of the side; views have 32 pixels.
    with open_image(write_geotiff(tmp_path / "a.tif", noise((side, side)))) as reader:
        walked = walk(model, views, [reader], crops=crops)
    assert walked.level.max() == levels


def test_every_choice_is_followed_whatever_the_plan_spares(model, views, readers):
    plan = Plan(levels=3, keep=(4, 4), budget=3)
    walked = walk(model, views, readers[:1], plan)
    assert torch.bincount(walked.level).tolist() == [0, 1, 4, 16]


def test_siblings_that_show_the_same_are_passed_over(model, views, readers):
    plan = replace(TWO, keep=(4,), most_shared=0.3)
    noted = Noted(model)
    loss = Loss(selection="sample")
    walked = walk(model, views, readers, plan, loss)
    for image in range(4):
        mine = ((walked.image == image) & (walked.level == 2)).nonzero().flatten().tolist()
        boxes = [noted.regions[i].window for i in mine]
        for one in boxes:
            for other in boxes:
                width = min(one.right, other.right) - max(one.left, other.left)
                height = min(one.bottom, other.bottom) - max(one.top, other.top)
                shared = max(width, 0) * max(height, 0) / (one.width * one.height)
                assert one is other or shared <= 0.3 + 1e-6


def test_one_level_is_seen_without_a_choice(model, views, readers):
    walked = walk(model, views, readers, Plan(levels=1, keep=()))
    assert walked.level.tolist() == [1] * 4
    assert len(walked.entropy) == 0
    assert learn(walked, PAPER, Baselines("ema", 1)).total.requires_grad


def same_cell(model, cell):
    """Let a model prefer one cell of every view."""
    look = model.look

    def biased(views, regions, *, score_cells=True):
        looked = look(views, regions, score_cells=score_cells)
        if looked.attention is None:
            return looked
        liked = torch.full_like(looked.attention, 0.01).flatten(1)
        liked[:, cell] = 0.92
        return looked._replace(attention=liked.view_as(looked.attention))

    model.look = biased


def test_choosing_the_same_cells_in_all_images_is_no_distinction(model, views, readers):
    walker = walker_of(model, views, TWO)
    same_cell(model, 4)
    walker.walk(batch_of(readers, views))
    assert walker.distinct == 0.0


def test_choosing_different_cells_in_all_images_is_full_distinction(model, views, readers):
    walker = walker_of(model, views, replace(TWO, keep=(1,)))
    look, cells = model.look, [0, 3, 5, 7]

    def spread(given, regions, *, score_cells=True):
        looked = look(given, regions, score_cells=True)
        liked = torch.zeros_like(looked.attention).flatten(1)
        liked[torch.arange(len(liked)), torch.tensor(cells)] = 1
        return looked._replace(attention=liked.view_as(looked.attention))

    model.look = spread
    walker.walk(batch_of(readers, views))
    assert walker.distinct == 1.0


def test_one_image_alone_cannot_be_stuck(model, views, readers):
    walker = walker_of(model, views, TWO)
    walker.walk(batch_of(readers[:1], views))
    assert walker.distinct == 1.0


def test_windows_are_counted(model, views, readers):
    walker = walker_of(model, views)
    walker.walk(batch_of(readers, views))
    assert walker.timing.windows == 4 * (1 + 2 + 2)
    assert walker.timing.waiting > 0


class Torn:
    """A reader that fails at windows of some width."""

    def __init__(self, reader, width):
        self._reader, self._width = reader, width
        self.path, self.size = reader.path, reader.size

    def read(self, window, out_size):
        if window.width <= self._width:
            raise ImageError(f"`{self.path}` is torn", hint="copy it again")
        return self._reader.read(window, out_size)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("width", [200, 100, 50])
def test_images_that_cannot_be_read_are_named(model, views, readers, samples, width):
    given = [readers[0], Torn(readers[1], width), readers[2], Torn(readers[3], width)]
    loss = Loss(selection="sample", samples=samples)
    with pytest.raises(UnreadableError) as caught:
        walk(model, views, given, THREE, loss)
    assert caught.value.problems.keys() == {1, 3}
    assert all("is torn" in str(each) for each in caught.value.problems.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_learned_from_is_in_single_precision(model, views, readers, precision):
    walked = walk(model, views, readers, precision=precision)
    for each in (walked.scores, walked.window_scores, walked.concluded, walked.log_p,
                 walked.entropy):  # fmt: skip
        assert each.dtype == torch.float32
        assert each.requires_grad
        assert each.isfinite().all()


def test_attention_that_is_no_number_is_a_model_error(model, views, readers):
    with torch.no_grad():
        model.location.score.bias.fill_(float("nan"))
    with pytest.raises(ModelError, match="not a number") as caught:
        walk(model, views, readers)
    assert "optimizer.rate" in caught.value.hint
