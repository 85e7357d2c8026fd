"""A profile as tables to read."""

from tnetcli.models.papers import BILLION
from tnetcli.wording import counted
from tnetcli.workflows.profile import Profile, Row
from tnetcli.workflows.tables import table

MEGA = 10**6


def as_text(profile: Profile) -> str:
    """Return a line on the model, a table of its parts and a table of its costs."""
    return "\n\n".join([_headline(profile), _parts(profile), _costs(profile), *_notes(profile)])


def _headline(profile: Profile) -> str:
    model = profile.model
    cells = "no cells" if model.most_levels == 1 else model.grid.described()
    return (
        f"{profile.source}\n"
        f"  {model.family} on {model.arguments.backbone}, views of {model.view_size} px, {cells}, "
        f"{counted(model.bands, 'band')}, {counted(model.classes, 'class', 'classes')}"
    )


def _parts(profile: Profile) -> str:
    parts = {**profile.parts, "all": profile.parameters}
    return table(
        "Parameters",
        ("part", "trainable", "with running statistics"),
        [(name, f"{part.trainable:,}", f"{part.total:,}") for name, part in parts.items()],
    )


def _costs(profile: Profile) -> str:
    measured = profile.measuring is not None
    return table(
        "Cost of one image; multiplications in billions",
        ("windows", "views", "conv+linear", "+ scaling", *(("ms", "peak MB") if measured else ())),
        [_cost(row) for row in profile.rows],
    )


def _cost(row: Row) -> tuple[str, ...]:
    count, measured = row.multiplications, row.measured
    name = f"{row.windows} (walk)" if row.is_walk else str(row.windows)
    views = "+".join(str(step.views) for step in row.steps)
    shown = (name, views, f"{count.layers / BILLION:.4f}", f"{count.total / BILLION:.4f}")
    if measured is None:
        return shown
    peak = "" if measured.peak_bytes is None else f"{measured.peak_bytes / MEGA:.0f}"
    return (*shown, f"{measured.milliseconds:.1f}", peak)


def _notes(profile: Profile) -> list[str]:
    how = profile.measuring
    if how is None:
        return []
    threads = f", {counted(how.threads, 'thread')}" if how.device == "cpu" else ""
    memory = f"\nThe peak is beyond the loaded model, by {how.memory}" if how.memory else ""
    return [
        f"Measured on {how.device}{threads}, {how.precision}: "
        f"median of {counted(how.repeats, 'run')} after a warm-up{memory}"
    ]
